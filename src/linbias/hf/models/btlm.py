# SPDX-License-Identifier: Apache-2.0
"""BTLM-3B-8k: JAIS under another name; see jais.py and docs/models/jais.md."""

from .jais import JAISConfig, JAISLMHeadModel, JAISModel, refusals
from .published import Published


class BTLMConfig(JAISConfig):
    """The published fields, which are JAIS's."""

    model_type = "btlm"


class BTLMModel(JAISModel):
    """`JAISModel`."""

    config_class = BTLMConfig


class BTLMLMHeadModel(JAISLMHeadModel):
    """`JAISLMHeadModel`."""

    config_class = BTLMConfig
    base_class = BTLMModel


PUBLISHED = Published(
    name="BTLM",
    claims=lambda config: config.get("model_type") == "btlm",
    refusals=refusals,
    config=BTLMConfig,
    classes={"BTLMModel": BTLMModel, "BTLMLMHeadModel": BTLMLMHeadModel},
)
