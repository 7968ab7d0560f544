# SPDX-License-Identifier: Apache-2.0
"""What a call means, at any granularity: the tensors and numbers of a call, its tokens, and the rule for blocks of them."""
