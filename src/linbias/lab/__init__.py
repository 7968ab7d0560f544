# SPDX-License-Identifier: Apache-2.0
"""The workbench: small models over bytes that differ only in how they know where a byte stands.

Its packages beyond torch come with `pip install 'linbias[lab]'`; importing it needs none of them. The command line
(`linbias --help`) is the usual way in; `compare.compare`, `train.train` and `evaluate.score` are what it calls.
"""

from .heads import effective_context as effective_context
