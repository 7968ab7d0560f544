# SPDX-License-Identifier: Apache-2.0
"""What a call means, at any granularity: its tensors and numbers, its tokens, and the rule for blocks of them."""
