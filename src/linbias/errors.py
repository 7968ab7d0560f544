# SPDX-License-Identifier: Apache-2.0
"""The one exception of linbias that torch and Python do not already have."""


class BackendUnavailable(NotImplementedError):
    """A backend was asked for by name and cannot run this call; the message says why and what can."""
