# SPDX-License-Identifier: Apache-2.0
"""transformers models through linbias. Importing this imports no transformers; patching or loading a model does.

`linbias.hf.cache` holds what subclasses transformers' cache, and so imports it.
"""

from .families import Family as Family
from .families import register as register
from .models.embeddings import late_chunks as late_chunks
from .models.embeddings import sentence_transformer as sentence_transformer
from .models.embeddings import token_spans as token_spans
from .models.load import load as load
from .models.load import load_tokenizer as load_tokenizer
from .patch import PatchedDecoder as PatchedDecoder
from .patch import Report as Report
from .patch import patch as patch
from .patch import unpatch as unpatch
