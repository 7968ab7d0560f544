# SPDX-License-Identifier: Apache-2.0
"""The kernels. Names: `i_` an index, `o_` offsets, `p_` pointers, `m_` masks, `b_` what is loaded or computed."""
