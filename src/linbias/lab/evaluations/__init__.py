# SPDX-License-Identifier: Apache-2.0
"""What is asked of a trained model beyond its loss: retrieval, streaming, numerics, what its heads look at."""
