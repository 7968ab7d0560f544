# SPDX-License-Identifier: Apache-2.0
"""Models that transformers does not hold, or holds no longer, as classes of our own that read published folders."""
