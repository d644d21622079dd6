"""The numbers of a Hugging Face config.json, which families of models spell differently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, reason
from lockstep.planner.model.transformer_shape import SEQUENCE, Described, describe

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
"""What the numbers are called, the usual name first."""
FFN = ("intermediate_size", "ffn_dim", "n_inner")
LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len")
LONGEST = 8192
"""Configs say how long a text may be at most; samples of training are taken to have no more tokens than this."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def from_config(path: Path, overrides: Mapping[str, Any]) -> Described:
    """The transformer that a config.json, or the one in a folder, describes."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason(error)})", "give a config.json or its folder") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error})", "give the config.json of a model") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no table", "give the config.json of a model")
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return from_values(name, config, overrides)


def from_values(name: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Described:
    """The transformer that the values of a config.json describe."""
    if experts := next((key for key in EXPERTS if (config.get(key) or 0) > 1), None):
        raise UserError(f"{name} has {config[experts]} experts a layer ({experts})", "plan a dense model")
    numbers = {key: _required(name, config, names) for key, names in NAMES.items()}
    family = str(config.get("model_type", ""))
    numbers |= FAMILIES.get(family, _usual)(config, numbers)
    if config.get("head_dim"):
        numbers["head_dim"] = config["head_dim"]
    longest = _first(config, LENGTH)
    numbers["sequence"] = min(longest, LONGEST) if isinstance(longest, int) else SEQUENCE
    return describe(name, {**numbers, **overrides})


Numbers = dict[str, Any]


def _gpt2(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    return {
        "ffn": config.get("n_inner") or 4 * numbers["hidden"],
        "positions": _first(config, LENGTH) or 0,
        "tied": config.get("tie_word_embeddings", True),
        "dropout": bool(config.get("resid_pdrop", 0.1)),
    }


def _llama(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    """Also mistral, qwen2 and qwen3, phi3 and others that are built like it."""
    family, hidden = config["model_type"], numbers["hidden"]
    ffn = _required(family, config, FFN)
    kv_heads = config.get("num_key_value_heads") or numbers["heads"]
    head_dim = config.get("head_dim") or hidden // numbers["heads"]
    made = (numbers["heads"] + 2 * kv_heads) * head_dim
    extra = 0
    if family == "qwen2":
        extra += made
    elif config.get("attention_bias"):
        extra += made + hidden
    if config.get("mlp_bias"):
        extra += 2 * ffn + hidden
    if family == "qwen3":  # norms of queries and of keys, shared by their heads
        extra += 2 * head_dim
    return {
        "like": "llama",
        "ffn": ffn,
        "kv_heads": kv_heads,
        "tied": config.get("tie_word_embeddings", False),
        "extra_block": extra,
    }


def _bert(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    """With the pooler, as BertModel has it, and a head over the vocabulary that shares the embedding."""
    return {
        "ffn": _required("bert", config, FFN),
        "positions": _required("bert", config, LENGTH) + config.get("type_vocab_size", 2),
        "causal": False,
        "dropout": bool(config.get("hidden_dropout_prob", 0.1)),
        "extra_head": numbers["hidden"] ** 2 + numbers["hidden"],
    }


def _gpt_neox(config: Mapping[str, Any], _: Numbers) -> Numbers:
    return {
        "ffn": _required("gpt_neox", config, FFN),
        "tied": config.get("tie_word_embeddings", False),
        "dropout": bool(config.get("hidden_dropout", 0.0)),
    }


def _opt(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    narrow = config.get("word_embed_proj_dim", numbers["hidden"])
    if narrow != numbers["hidden"]:
        raise UserError(
            f"the embedding of this opt is {narrow} wide and its blocks {numbers['hidden']} (word_embed_proj_dim)",
            "plan a model whose embedding is as wide as its blocks",
        )
    return {
        "ffn": _required("opt", config, FFN),
        "positions": _required("opt", config, LENGTH) + 2,
        "tied": config.get("tie_word_embeddings", True),
        "dropout": bool(config.get("dropout", 0.1)),
    }


def _mpt(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    attention = config.get("attn_config") or {}
    biases = not config.get("no_bias", True)
    return {
        "ffn": int(config.get("expansion_ratio", 4) * numbers["hidden"]),
        "kv_heads": attention.get("kv_n_heads", 0),
        "positions": 0 if attention.get("alibi", True) or attention.get("rope") else _required("mpt", config, LENGTH),
        "biases": biases,
        "norm": "layer" if biases else "rms",  # without biases a layer norm has as many parameters as an RMS norm
    }


def _phi(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    """Attention and MLP read the same norm, so that a block has one; the head has a bias."""
    return {
        "ffn": _required("phi", config, FFN),
        "kv_heads": config.get("num_key_value_heads") or 0,
        "tied": config.get("tie_word_embeddings", False),
        "extra_block": -2 * numbers["hidden"],
        "extra_head": numbers["vocab"],
    }


def _usual(config: Mapping[str, Any], numbers: Numbers) -> Numbers:
    """A family that is not known: like llama where it has RMS norms, else like GPT-2."""
    found: Numbers = {
        "ffn": _required(str(config.get("model_type", "this config")), config, FFN),
        "kv_heads": config.get("num_key_value_heads") or numbers["heads"],
    }
    if "rms_norm_eps" in config:
        return found | {"like": "llama", "tied": config.get("tie_word_embeddings", False)}
    rotary = any(key in config for key in ("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct"))
    return found | {
        "positions": 0 if rotary else _first(config, LENGTH) or 0,
        "tied": config.get("tie_word_embeddings", True),
    }


FAMILIES = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "phi3": _llama,
    "bert": _bert,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "mpt": _mpt,
    "phi": _phi,
}


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _required(name: str, config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = _first(config, names)
    if found is None:
        raise UserError(f"{name} has no {names[0]}", f"add {names[0]} to its config.json, which the planner needs")
    if isinstance(found, bool) or not isinstance(found, int):
        raise UserError(f"{names[0]} of {name} is {found!r}", "it has to be a whole number")
    return found
