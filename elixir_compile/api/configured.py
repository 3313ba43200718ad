"""A Hugging Face configuration as what makes a model: of all its layers, or of fewer that are otherwise the same."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elixir_compile.errors import UnsupportedModel

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Fields of configurations with a number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A model that its configuration describes, with random weights."""

    name: str
    config: Any
    """A `transformers.PretrainedConfig`, which nobody changes."""
    class_name: str
    """The class of transformers that makes a model of `config`: `AutoModelForCausalLM`."""
    dtype: torch.dtype
    """Of parameters and compute."""
    recompute: bool = False
    """Whether each layer computes its activations again in the backward, where the model knows how."""

    @property
    def num_layers(self) -> int | None:
        """Return how many layers each stack of the model has; None if stacks differ or it is not known."""
        counts = set(self._layer_fields().values())
        return counts.pop() if len(counts) == 1 else None

    def model(self, num_layers: int | None = None) -> nn.Module:
        """Return the model on `meta`, in training mode, of `num_layers` layers or of all.

        Raises UnsupportedModel if transformers has no such model, and if fewer layers are wanted of a model that has
        no such form, as its layers differ by the configuration.
        """
        import transformers

        if num_layers is not None:
            try:
                return replace(self, config=self._of_fewer(num_layers)).model()
            except Exception as error:  # of a model whose authors did not think of this number
                raise UnsupportedModel(self.name, f"it has no form with {num_layers} layers: {error}") from error
        config = copy.deepcopy(self.config)
        config.use_cache = False  # keys and values of earlier tokens are of no use in training
        with torch.device("meta"):
            try:
                model = getattr(transformers, self.class_name).from_config(config, dtype=self.dtype)
            except ValueError as error:
                reason = f"transformers has no causal language model for it. {str(error).splitlines()[0]}"
                raise UnsupportedModel(self.name, reason) from error
        return trained(model, recompute=self.recompute)

    def _layer_fields(self) -> Mapping[str, int]:
        fields = vars(self.config)
        return {name: fields[name] for name in _LAYERS if type(fields.get(name)) is int}

    def _of_fewer(self, num_layers: int) -> Any:
        """Return the configuration of `num_layers` layers.

        Raises UnsupportedModel if one of its lists has an entry for each layer, and these differ.
        """
        config = copy.deepcopy(self.config)
        for name in self._layer_fields():
            setattr(config, name, num_layers)
        for name, value in vars(self.config).items():
            if isinstance(value, list) and value and len(value) == self.num_layers:
                if any(entry != value[0] for entry in value):
                    raise UnsupportedModel(self.name, f"its layers differ: {name} has several values")
                setattr(config, name, value[:num_layers])
        return config


def trained(model: nn.Module, *, recompute: bool) -> nn.Module:
    """Return `model` as it is trained, by checkpoints of its layers if it has to `recompute`.

    Raises UnsupportedModel for a model that cannot be told so.
    """
    model.train()
    if recompute:
        # Called so since transformers 5, and `gradient_checkpointing_enable` before.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next((getattr(model, name) for name in names if callable(getattr(model, name, None))), None)
        if enable is None:
            raise UnsupportedModel(type(model).__name__, f"it has no `{names[0]}`, so it cannot be told to recompute")
        enable({"use_reentrant": False})
    return model
