# SPDX-License-Identifier: Apache-2.0
"""One small class for each way to tell a model where a byte stands; `lab.positions` names them."""
