# SPDX-License-Identifier: Apache-2.0
"""Heads on a `BaseEncoder`: masked language model, text and token classification. The losses are transformers' own."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput, TokenClassifierOutput

from .encoder import BaseEncoder, EncoderModel, check_config


class Transform(nn.Module):
    """LayerNorm(act(dense(x)))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., width)."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden)))


class Predictions(nn.Module):
    """Logits over the vocabulary: the word embeddings, transposed, and a bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., vocabulary)."""
        return self.decoder(self.transform(hidden))


class PredictionHead(nn.Module):
    """`Predictions` under the name that it has in the checkpoints."""

    def __init__(self, predictions: Predictions) -> None:
        super().__init__()
        self.predictions = predictions


_POOLER = [*(EncoderModel._keys_to_ignore_on_load_unexpected or ()), r"^bert\.pooler\."]


class Head(EncoderModel):
    """A base model and what reads its vectors; a family names the base model's class."""

    base_class: ClassVar[type[BaseEncoder]]
    output_class: ClassVar[type[Any]]
    pools: ClassVar[bool] = False
    """The head reads `pooler_output`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_config(self, config)
        # Saved with it, so that a base model built from this folder knows what weights there are.
        config.add_pooling_layer = self.pools
        self.bert = self.base_class(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: Any) -> None:
        """Its parameters, under their published names."""
        raise NotImplementedError

    def logits(self, output: Any) -> Tensor:
        """Of the base model's output."""
        raise NotImplementedError

    def loss_arguments(self, logits: Tensor) -> dict[str, Any]:
        """What transformers' loss of the head's name takes, beside labels."""
        return {"logits": logits, "config": self.config}

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> Any:
        """As `BaseEncoder.forward`, with logits, and with labels their loss."""
        output = self.bert(input_ids, return_dict=True, **given)
        logits, loss = self.logits(output), None
        if labels is not None:
            compute: Any = self.loss_function
            loss = compute(labels=labels, num_items_in_batch=num_items_in_batch, **self.loss_arguments(logits))
        states, weights = output.hidden_states, output.attentions
        whole = self.output_class(loss=loss, logits=logits, hidden_states=states, attentions=weights)
        return whole if (self.config.return_dict if return_dict is None else return_dict) else whole.to_tuple()


class MaskedLM(Head):
    """Logits (B, T, vocabulary); labels (B, T), -100: none."""

    output_class = MaskedLMOutput
    _keys_to_ignore_on_load_unexpected = _POOLER
    predictions_class: ClassVar[type[Predictions]] = Predictions

    def add_head(self, config: Any) -> None:
        """`cls.predictions`."""
        self.cls = PredictionHead(self.predictions_class(config))

    def get_output_embeddings(self) -> nn.Module:
        """The last layer."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the last layer."""
        self.cls.predictions.decoder = new_embeddings

    def logits(self, output: Any) -> Tensor:
        """At every place."""
        return self.cls.predictions(output.last_hidden_state)

    def loss_arguments(self, logits: Tensor) -> dict[str, Any]:
        """The size instead of the configuration."""
        return {"logits": logits, "vocab_size": self.config.vocab_size}


class _Classifier(Head):
    def add_head(self, config: Any) -> None:
        """`classifier`."""
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)


class SequenceClassifier(_Classifier):
    """Logits (B, labels) of the pooled vector, and the loss of `config.problem_type`; rerankers have one label."""

    output_class = SequenceClassifierOutput
    pools = True

    def logits(self, output: Any) -> Tensor:
        """One row a text."""
        return self.classifier(self.dropout(output.pooler_output))

    def loss_arguments(self, logits: Tensor) -> dict[str, Any]:
        """By the name that transformers has for them."""
        return {"pooled_logits": logits, "config": self.config}


class TokenClassifier(_Classifier):
    """Logits (B, T, labels) of every token's vector; labels (B, T), -100: none."""

    output_class = TokenClassifierOutput
    _keys_to_ignore_on_load_unexpected = _POOLER

    def logits(self, output: Any) -> Tensor:
        """One row a token."""
        return self.classifier(self.dropout(output.last_hidden_state))
