"""Which matrices of a plain model tp cuts, how, and why not the others: found by following values through its code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.pipeline.stage import skeleton_of
from lockstep.parallel.tensor.modules import Role
from lockstep.parallel.tensor.plan_matrices import TensorPlan, plan_tensor

WIDTH = 24
HEADS = 6
HEAD = WIDTH // HEADS
TOKENS = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(2, 5, WIDTH)


def plan(model: nn.Module, batch: Any = VALUES, tp: int = 2, roles: dict[str, str] | None = None) -> TensorPlan:
    def look(skeleton: nn.Module) -> torch.Tensor:
        result: torch.Tensor = skeleton(batch)
        return result.float().square().sum()

    return plan_tensor(skeleton_of(model, torch.device("cpu")), look, roles or {}, tp)


def plan_classifier(model: nn.Module, classes: int, tp: int = 2) -> TensorPlan:
    labels = TOKENS.flatten() % classes

    def look(skeleton: nn.Module) -> torch.Tensor:
        return F.cross_entropy(skeleton(TOKENS).flatten(0, 1), labels, reduction="sum")

    return plan_tensor(skeleton_of(model, torch.device("cpu")), look, {}, tp)


class Stack(nn.Module):
    """Two blocks, each beside a residual."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def kinds(found: TensorPlan, block: str = "blocks.0.") -> dict[str, str]:
    """What the matrices of one block are."""
    return {name.removeprefix(block): role.kind for name, role in found.roles.items() if name.startswith(block)}


# ---- Attention


def split_heads(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], heads, HEAD).transpose(1, 2)


def by_view(x: torch.Tensor) -> Any:
    return x.view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)


def by_unbind(x: torch.Tensor) -> Any:
    return x.reshape(x.shape[0], x.shape[1], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)


def by_split(x: torch.Tensor) -> Any:
    return map(split_heads, torch.split(x, WIDTH, dim=2))


def by_chunk(x: torch.Tensor) -> Any:
    return map(split_heads, x.chunk(3, -1))


def by_slices(x: torch.Tensor) -> Any:
    return map(split_heads, (x[..., :WIDTH], x[..., WIDTH : 2 * WIDTH], x[..., 2 * WIDTH :]))


def head_by_head(x: torch.Tensor) -> Any:
    """As GPT-NeoX has it: query, key and value of one head, then those of the next."""
    return x.view(*x.shape[:2], HEADS, 3 * HEAD).transpose(1, 2).chunk(3, -1)


class Fused(nn.Module):
    def __init__(self, take_apart: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.take_apart = take_apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.take_apart(self.qkv(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(x.shape))  # type: ignore[no-any-return]


THREE = (WIDTH, WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("take_apart", "parts"),
    [
        (by_view, THREE),
        (by_unbind, THREE),
        (by_split, THREE),
        (by_chunk, THREE),
        (by_slices, THREE),
        (head_by_head, (3 * WIDTH,)),
    ],
)
def test_a_fused_matrix_is_cut_as_the_code_takes_its_result_apart(
    take_apart: Callable[[torch.Tensor], Any], parts: tuple[int, ...]
) -> None:
    found = plan(Stack(partial(Fused, take_apart)))
    for block in ("blocks.0", "blocks.1"):
        assert found.roles[f"{block}.qkv"] == Role("column", parts)
        assert found.roles[f"{block}.out"] == Role("row", (WIDTH,))
        assert found.partners[f"{block}.qkv"] == [f"{block}.out"]
        assert (HEADS, "heads") in found.sizes[f"{block}.qkv"]
    assert found.whole == {}


class Separate(nn.Module):
    """Queries, keys and values of their own; fewer key heads than heads are shared by several queries."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, key_heads * HEAD) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = split_heads(self.query(x))
        key, value = (split_heads(layer(x), self.key_heads) for layer in (self.key, self.value))
        grouped = self.key_heads < HEADS
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


ATTENTION = {"query": "column", "key": "column", "value": "column", "out": "row"}


def test_separate_queries_keys_and_values_are_columns() -> None:
    found = plan(Stack(Separate))
    assert kinds(found) == ATTENTION
    assert found.partners["blocks.0.value"] == ["blocks.0.out"]


def test_grouped_queries_are_cut_with_their_keys() -> None:
    found = plan(Stack(partial(Separate, key_heads=2)))
    assert kinds(found) == ATTENTION
    assert (2, "heads") in found.sizes["blocks.0.key"]


class OneKey(Separate):
    """One key for all queries, written out."""

    def __init__(self) -> None:
        super().__init__(key_heads=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = split_heads(self.query(x)), self.key(x).unsqueeze(1), self.value(x).unsqueeze(1)
        shares = (query @ key.transpose(-1, -2) / HEAD**0.5).softmax(-1)
        return self.out((shares @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "attention",
    [
        OneKey,
        partial(Separate, key_heads=1),
    ],
)
def test_one_key_for_all_queries_stays_whole(attention: Callable[[], nn.Module]) -> None:
    found = plan(Stack(attention))
    assert kinds(found) == {"query": "column", "out": "row"}
    assert found.whole.keys() == {f"blocks.{n}.{name}" for n in (0, 1) for name in ("key", "value")}


def test_heads_that_do_not_divide_are_refused_with_those_that_would() -> None:
    with pytest.raises(UserError, match="tp must divide 6 heads: 1, 2, 3 or 6") as refused:
        plan(Stack(partial(Fused, by_view)), tp=4)
    assert "blocks.0.qkv cannot be cut for tp=4: tp must divide 6 heads: 1, 2, 3 or 6" in str(refused.value)
    assert 'tensor.roles={"blocks.*.qkv": "whole"}' in str(refused.value)


def test_key_heads_that_do_not_divide_are_refused_too() -> None:
    with pytest.raises(UserError, match=r"blocks\.0\.key cannot be cut for tp=3: tp must divide 2 heads: 1 or 2"):
        plan(Stack(partial(Separate, key_heads=2)), tp=3)


# ---- Other blocks


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class FusedGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 80)
        self.down = nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def test_the_two_matrices_of_a_gated_mlp_are_columns_of_one_row() -> None:
    found = plan(Stack(GatedMlp))
    assert kinds(found) == {"gate": "column", "up": "column", "down": "row"}
    assert found.partners["blocks.0.gate"] == found.partners["blocks.0.up"] == ["blocks.0.down"]


def test_a_fused_gate_is_cut_half_by_half() -> None:
    found = plan(Stack(FusedGate))
    assert found.roles["blocks.0.both"] == Role("column", (40, 40))
    assert found.roles["blocks.0.down"] == Role("row", (40,))


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


def test_a_norm_behind_a_row_sees_the_sum() -> None:
    found = plan(Stack(PostNorm))
    assert kinds(found) == {"up": "column", "down": "row"}
    assert found.whole == {}


def test_a_plain_perceptron_alternates() -> None:
    layers: list[nn.Module] = []
    for takes, gives in ((WIDTH, 32), (32, 32), (32, 16), (16, 8)):
        layers += [nn.Linear(takes, gives), nn.ReLU()]
    found = plan(nn.Sequential(*layers))
    assert {name: role.kind for name, role in found.roles.items()} == {
        "0": "column", "2": "row", "4": "column", "6": "row",
    }  # fmt: skip


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 48, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**options) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return x


def test_the_layers_of_torch_are_cut_by_head_and_by_feature() -> None:
    found = plan(EncoderDecoder())
    mlp = {"linear1": "column", "linear2": "row"}
    assert kinds(found, "encoder.0.") == {"self_attn": "heads", **mlp}
    assert kinds(found, "decoder.1.") == {"self_attn": "heads", "multihead_attn": "heads", **mlp}
    assert (HEADS, "heads") in found.sizes["encoder.0.self_attn"]
    with pytest.raises(UserError, match=r"encoder\.0\.self_attn cannot be cut for tp=4: tp must divide 6 heads"):
        plan(EncoderDecoder(), tp=4)


def test_an_attention_with_a_learnt_key_stays_whole_and_says_why() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, batch_first=True)
            self.mlp = GatedMlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.attention(x, x, x)[0])  # type: ignore[no-any-return]

    found = plan(Stack(Layer))
    assert "add_bias_kv" in found.whole["blocks.0.attention"]
    assert found.roles["blocks.0.mlp.down"].kind == "row"


# ---- What has to stay whole


class NormedInside(nn.Module):
    """Its norm goes over the features between two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.norm = nn.LayerNorm(48)
        self.more = nn.Sequential(nn.LayerNorm(WIDTH), GatedMlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.down(self.norm(self.up(x))))  # type: ignore[no-any-return]


def test_a_norm_over_cut_features_keeps_its_matrix_whole_and_names_the_line() -> None:
    found = plan(Stack(NormedInside))
    why = found.whole["blocks.0.up"]
    line = NormedInside.forward.__code__.co_firstlineno + 1
    assert why.startswith("layer_norm goes over the dim that is cut (")
    assert why.endswith(f"test_tensorplan.py:{line})")
    assert kinds(found) == {"more.1.gate": "column", "more.1.up": "column", "more.1.down": "row"}


class Routed(nn.Module):
    """Two experts, mixed by the softmax of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(GatedMlp() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + expert(x) * shares[..., number, None]
        return mixed


def test_a_router_stays_whole_and_its_experts_are_cut() -> None:
    found = plan(Stack(Routed))
    assert "softmax goes along the dim that is cut" in found.whole["blocks.0.router"]
    assert found.roles["blocks.0.experts.1.down"].kind == "row"


def test_a_weight_that_is_used_outside_of_its_module_stays_whole() -> None:
    class Peeks(GatedMlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + F.linear(F.linear(x, self.up.weight), self.up.weight.t())

    found = plan(Stack(Peeks))
    assert "used outside of it" in found.whole["blocks.0.up"]


# ---- Vocabularies and positions


class Language(nn.Module):
    def __init__(self, vocabulary: int = 30, tied: bool = False, positions: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(16, WIDTH) if positions else None
        self.body = Stack(GatedMlp)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.body(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_is_shared_out_in_table_and_head(tied: bool) -> None:
    found = plan_classifier(Language(tied=tied), 30)
    assert found.roles["tokens"] == Role("vocabulary", (30,))
    assert found.roles["head"] == Role("column", (30,))


@pytest.mark.parametrize("tied", [False, True])
def test_an_odd_vocabulary_is_shared_out_too(tied: bool) -> None:
    found = plan_classifier(Language(31, tied), 31)
    assert found.roles["tokens"] == Role("vocabulary", (31,))
    assert found.roles["head"] == Role("column", (31,))


def test_a_table_of_positions_stays_whole() -> None:
    found = plan_classifier(Language(), 30)
    assert found.whole == {"positions": "a table of positions"}


def test_a_table_that_is_tied_to_a_whole_head_is_whole() -> None:
    class Normed(Language):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens).softmax(-1)

    found = plan(Normed(tied=True), TOKENS)
    assert "softmax" in found.whole["head"]
    assert found.whole["tokens"] == "it is tied to head, which is whole"


def test_a_small_table_stays_whole() -> None:
    class Typed(Language):
        def __init__(self) -> None:
            super().__init__(vocabulary=300)
            self.kinds = nn.Embedding(2, WIDTH)
            self.scale = nn.Parameter(torch.zeros(20_000))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.tokens.register_forward_hook(lambda _, args, result: result + self.kinds(args[0] % 2))
            return super().forward(tokens)

    assert plan_classifier(Typed(), 300).whole["kinds"] == "a small table"


# ---- tensor.roles


def test_a_role_that_is_stated_is_taken() -> None:
    found = plan(Stack(GatedMlp), roles={"blocks.0.*": "whole"})
    assert kinds(found) == {}
    assert kinds(found, "blocks.1.") == {"gate": "column", "up": "column", "down": "row"}
    assert found.whole["blocks.0.gate"] == "tensor.roles says so"


def test_what_a_stated_whole_matrix_takes_in_is_whole_too() -> None:
    found = plan(Stack(FusedGate), roles={"blocks.0.down": "whole"})
    assert kinds(found) == {}
    assert "tensor.roles says that blocks.0.down, which takes it in, is whole" in found.whole["blocks.0.both"]


def test_a_row_that_is_stated_takes_whole_values() -> None:
    found = plan(Stack(NormedInside), roles={"blocks.*.down": "row"})
    assert found.roles["blocks.0.down"] == Role("row", (48,))
    assert "layer_norm" in found.whole["blocks.0.up"]


def test_a_column_that_cannot_be_is_refused_with_the_line() -> None:
    line = NormedInside.forward.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=r"tensor\.roles makes blocks\.0\.up a column, and it cannot be cut") as refused:
        plan(Stack(NormedInside), roles={"blocks.*.up": "column"})
    assert f"test_tensorplan.py:{line}" in str(refused.value)


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"tensor\.roles names 'blocks\.\*\.mlp', and the model has no matrix of that"):
        plan(Stack(GatedMlp), roles={"blocks.*.mlp": "whole"})


# ---- Nothing to cut


def test_a_model_of_which_nothing_can_be_cut_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.ReLU())
    with pytest.raises(UserError, match="tp=2 would cut nothing"):
        plan(model)


def test_blocks_of_which_nothing_can_be_cut_are_refused_with_reasons() -> None:
    class Softly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mix(x).softmax(-1)  # type: ignore[no-any-return]

    with pytest.raises(UserError, match=r"tp=2 would cut nothing .*blocks\.0\.mix: softmax goes along the dim that is"):
        plan(Stack(Softly))


# ---- What sees gradients, of which a rank has a share


class Rounded(torch.autograd.Function):
    """Lets gradients through as they are."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient.clamp(-1, 1))  # type: ignore[no-untyped-call]
    return x


def penalised(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(x.sum(), x, create_graph=True)
    return x + gradient


@pytest.mark.parametrize(
    ("through", "sentence"),
    [
        (hooked, "has a hook on a gradient"),
        (penalised, "has a gradient inside the loss"),
        (torch.vmap(torch.sin), r"gives torch\.vmap a cut tensor"),
    ],
)
def test_code_that_would_see_a_share_of_a_gradient_is_refused(through: Any, sentence: str) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(through(self.up(x)))  # type: ignore[no-any-return]

    with pytest.raises(UserError, match=sentence):
        plan(Stack(Mlp))


def test_what_an_own_function_is_given_stays_whole() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(Rounded.apply(self.gate(x)))))  # type: ignore[no-any-return,no-untyped-call]

    found = plan(Stack(Mlp))
    (gate,) = {name for name in found.whole if name.endswith("0.gate")}
    assert "Rounded is an autograd.Function" in found.whole[gate]
    assert found.roles[gate.replace("gate", "up")].kind == "column"


@pytest.mark.parametrize("used", ["shape", "sum in a list"])
def test_a_matrix_whose_weight_is_looked_at_elsewhere_stays_whole(used: str) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.up.weight
            factor = weight.shape[0] if used == "shape" else torch.stack([weight, weight]).sum()
            return self.down(self.up(x)) / factor + self.other(x)  # type: ignore[no-any-return]

    found = plan(Stack(Mlp))
    assert kinds(found) == {"other.0": "column", "other.2": "row"}
    assert "its weight is used outside of it" in found.whole["blocks.0.up"]
