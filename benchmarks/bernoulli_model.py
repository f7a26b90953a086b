"""What Bernoulli scores do to a real model: SmolLM2-135M after a long text.

    python benchmarks/bernoulli_model.py [--context 4096] [--steps 8] [--draws 1 2 4 8 16 32 64]
        [--seeds 4] [--tokens 32] [--model ...] [--text FILE] [--quick] [--out DIR]

The queries, keys and values of every layer are taken from the model while it reads on; each query
is then attended with Bernoulli scores and with dense weights, so that nothing else is sampled. The
last column lets the model itself run so, in all layers, on the tokens of the text.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bernoulli_queries import Queries, access, kurtosis, match
from bernoulli_report import Row, StudyError, axes, table, write_csv
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import santa_torch
from santa_torch import BernoulliConfig, SantaConfig, hf
from santa_torch.bench import steps
from santa_torch.demo import options, subject
from santa_torch.files import make_directory

FORMS = {"paper": False, "shared": True}
CAPTURE = "bernoulli_capture"


@dataclass(frozen=True)
class Layer:
    """What one layer attended with.

    Parameters
    ----------
    index : int
        Of the layer.
    q : Tensor
        float32 ``[P, Hq, D]``: a query for each step.
    k, v : Tensor
        float32 ``[1, Hkv, L, D]``: all rows; step i attends the first ``context + i + 1``.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def grouped(self) -> torch.Tensor:
        """The queries by group, ``[P * Hkv, G, D]``."""
        return self.q.reshape(-1, self.q.shape[1] // self.k.shape[1], self.q.shape[2])


def capture(model: Any, tokens: torch.Tensor, context: int) -> list[Layer]:
    """Let the model read on from ``context`` and keep what its layers attend with."""
    queries: dict[int, list[torch.Tensor]] = {}

    def keep(module: Any, query: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        queries.setdefault(module.layer_idx, []).append(query[0, :, 0].clone())
        return sdpa_attention_forward(module, query, *rest, **kwargs)

    AttentionInterface.register(CAPTURE, keep)
    AttentionMaskInterface.register(CAPTURE, sdpa_mask)
    cache = DynamicCache(config=model.config)
    steps.prefill(model, tokens[:, :context], cache, lambda done: None)
    with steps.attention(model, CAPTURE):
        for place in range(context, tokens.shape[1]):
            steps.forward(model, model, tokens[:, place : place + 1], place, cache)
    layers: list[Any] = cache.layers
    return [
        Layer(index, torch.stack(queries[index]), layer.keys, layer.values)
        for index, layer in enumerate(layers)
    ]


# ---- the error of attention ----------------------------------------------------------------------


@dataclass
class Sums:
    """Running sums over layers, for one form and one number of draws."""

    features: float = 0.0
    squared: float = 0.0
    crossed: float = 0.0
    noise: float = 0.0
    common: float = 0.0
    layers: int = 0

    def add(
        self,
        layer: Layer,
        exact: torch.Tensor,
        context: int,
        config: BernoulliConfig,
        seeds: int,
    ) -> None:
        """Attend the layer's queries with several seeds; ``exact`` is float64 ``[P, Hq, Dv]``.

        ``squared`` is the mean over heads and steps of the squared relative error, ``crossed`` that
        of the products of errors of different seeds, whose expectation is the squared bias.
        ``noise`` is the mean square of what is added to a score, ``common`` the part of it that is
        the same for all rows.
        """
        size = exact.square().sum(-1)
        errors, features = [], []
        for seed in range(seeds):
            result = attend(layer, context, config, seed)
            assert result.stats is not None
            errors.append(result.out.double() - exact)
            features.append(result.stats.key_features.double().mean())
        self.features += float(torch.stack(features).mean()) / layer.q.shape[-1]
        each = torch.stack([error.square().sum(-1) for error in errors]).sum(0)
        whole = torch.stack(errors).sum(0).square().sum(-1)
        self.squared += float((each / seeds / size).mean())
        if seeds > 1:
            self.crossed += float(((whole - each) / (seeds * (seeds - 1)) / size).mean())
        noise = score_noise(layer, context, config)
        self.noise += float(noise.square().mean())
        self.common += float(noise.mean(-1).square().mean())
        self.layers += 1

    def row(self) -> Row:
        """The means; ``left`` is the noise beside what all rows have in common."""
        n = self.layers
        return {
            "features": 100 * self.features / n,
            "error": math.sqrt(self.squared / n),
            "bias": math.sqrt(max(0.0, self.crossed / n)),
            "noise": math.sqrt(self.noise / n),
            "left": math.sqrt((self.noise - self.common) / n),
        }


def attend(layer: Layer, context: int, config: BernoulliConfig | None, seed: int) -> Any:
    """Dense attention of all steps at once, as a batch over the same keys."""
    count = len(layer.q)
    position = context + torch.arange(count)
    return santa_torch.decode(
        layer.q,
        layer.k.expand(count, -1, -1, -1),
        layer.v.expand(count, -1, -1, -1),
        method="dense",
        seq_lens=position + 1,
        bernoulli=config,
        seed=seed,
        position=position,
        layer=layer.index,
        return_stats=True,
    )


def score_noise(layer: Layer, context: int, config: BernoulliConfig) -> torch.Tensor:
    """What Bernoulli draws add to the scores, ``[P, Hkv, G, context]``; of the first seed."""
    count, heads, dim = layer.q.shape
    kv_heads = layer.k.shape[1]
    query = santa_torch.bernoulli_query(
        layer.q,
        draws=config.draws,
        shared=config.shared,
        kv_heads=kv_heads,
        seed=0,
        position=context + torch.arange(count),
        layer=layer.index,
    )
    wrong = (query - layer.q).view(count, kv_heads, heads // kv_heads, dim)
    noise: torch.Tensor = wrong @ layer.k[:, :, :context].mT / math.sqrt(dim)
    return noise


# ---- the model as a whole ------------------------------------------------------------------------


class Forced:
    """The model reads the text on, token by token, again and again from the same rows."""

    def __init__(self, model: Any, tokens: torch.Tensor, context: int) -> None:
        self.model, self.tokens, self.context = model, tokens, context
        self.cache = hf.SantaCache(model.config, reserve=tokens.shape[1])
        steps.prefill(model, tokens[:, :context], self.cache, lambda done: None)
        self.exact = list(self._read(None))

    def distance(self, config: BernoulliConfig) -> float:
        """Mean total variation distance of the next-token distributions."""
        settings = SantaConfig("dense", samples=None, bernoulli=config)
        pairs = zip(self._read(settings), self.exact, strict=True)
        found = [0.5 * float((p - exact).abs().sum()) for p, exact in pairs]
        return sum(found) / len(found)

    def _read(self, settings: SantaConfig | None) -> Iterator[torch.Tensor]:
        with steps.attention(self.model, settings):
            for place in range(self.context, self.tokens.shape[1]):
                token = self.tokens[:, place : place + 1]
                logits = steps.forward(self.model, self.model, token, place, self.cache)
                yield logits[0].double().softmax(-1)
        steps.undo(self.cache, self.tokens.shape[1] - self.context)


# ---- the queries ---------------------------------------------------------------------------------


def likeness(q: torch.Tensor) -> float:
    """Mean product of two heads' features, each head scaled to a mean square of 1."""
    unit = q / q.square().mean(-1, keepdim=True).sqrt()
    heads = q.shape[-2]
    both = unit.sum(-2).square().mean() - heads * unit.square().mean()
    return float(both) / (heads * (heads - 1))


def predict(layers: Sequence[Layer], draws: Sequence[int]) -> tuple[str, list[Row]]:
    """What the model's queries touch, beside synthetic ones of their kurtosis and likeness."""
    real = torch.cat([layer.grouped for layer in layers])
    by_layer = [kurtosis(layer.grouped) for layer in layers]
    target, alike = kurtosis(real), min(max(likeness(real), 0.0), 0.99)
    made = Queries("log-normal", 2000, real.shape[1], real.shape[2])
    # 0 at the widest, where a query's largest feature is nearly all of it.
    spread = match(lambda spread: -kurtosis(made(spread, alike)), -target, 0.0, made.widest)
    text = (
        f"kurtosis of the queries {target:.1f} (layers {min(by_layer):.1f} to {max(by_layer):.1f}),"
        f" likeness of the heads of a group {alike:.2f}"
    )
    rows = []
    for count in draws:
        row: Row = {"draws": count}
        for who, q in (("model", real), ("synthetic", made(spread, alike))):
            shares = vars(access(q, count))
            row |= {f"{who} {kind}": 100 * share for kind, share in shares.items()}
        rows.append(row)
    return text, rows


# ---- the command ---------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> str:
    """The table of errors."""
    head = ("form", "draws", "features read", "score noise", "not common", "error", "of it bias")
    lines = [
        [
            row["form"],
            str(row["draws"]),
            f"{row['features']:.1f} %",
            f"{row['noise']:.2f}",
            f"{row['left']:.2f}",
            f"{100 * row['error']:.0f} %",
            f"{100 * row['bias']:.0f} %",
            "" if row["tvd"] is None else f"{row['tvd']:.3f}",
        ]
        for row in rows
    ]
    return table([*head, "next-token TVD"], lines)


def show_queries(rows: Sequence[Row]) -> str:
    """The table of what is touched."""
    lines = []
    for row in rows:
        cells = [
            f"{row[f'model {kind}']:.1f} ({row[f'synthetic {kind}']:.1f})"
            for kind in ("head", "union", "mean")
        ]
        lines.append([str(row["draws"]), *cells])
    return table(["draws", "one head", "group", "mean query"], lines)


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Error and distance against features read; False without matplotlib."""
    shown = {"error": "error of attention outputs", "tvd": "next-token TVD"}
    keys = [key for key in shown if rows[0][key] is not None]
    figure, panels = axes(len(keys), [shown[key] for key in keys])
    if figure is None:
        return False
    for key, panel in zip(keys, panels, strict=True):
        for form in FORMS:
            points = [(row["features"], row[key]) for row in rows if row["form"] == form]
            panel.plot(*zip(*points, strict=True), marker="o", label=form)
        panel.set(yscale="log", xlabel="% of the key features read")
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    return True


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, help="rows before the first step (default: 4096)")
    parser.add_argument("--steps", type=int, help="queries of each layer (default: 8)")
    parser.add_argument("--draws", type=int, nargs="+", help="default: 1 2 4 8 16 32 64")
    parser.add_argument("--seeds", type=int, help="of each query (default: 4)")
    parser.add_argument("--tokens", type=int, help="for the TVD, 0 for none (default: 32)")
    parser.add_argument("--model", help="as for the demo (default: the packaged SmolLM2-135M)")
    parser.add_argument("--text", help="file to read (default: Python's documentation topics)")
    parser.add_argument("--quick", action="store_true", help="256 rows, 2 steps, 2 seeds, no TVD")
    parser.add_argument("--out", type=Path, default=Path("out/bernoulli_model"), help="folder")
    args = parser.parse_args(argv)
    usual = {"context": 4096, "steps": 8, "seeds": 4, "tokens": 32}
    quick = {"context": 256, "steps": 2, "seeds": 2, "tokens": 0}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < (name != "tokens"):
            parser.error(f"--{name}: must be positive, got {getattr(args, name)}")
    args.draws = args.draws or ([4, 64] if args.quick else [1, 2, 4, 8, 16, 32, 64])
    if not all(1 <= draws <= 1024 for draws in args.draws):
        parser.error(f"--draws: must be between 1 and 1024, got {args.draws}")
    return args


def load(args: argparse.Namespace) -> subject.Subject:
    """The model, and tokens for the longer of the two parts."""
    tokens = max(args.steps, args.tokens)
    given = ["--context", str(args.context), "--tokens", str(tokens)]
    for name in ("model", "text"):
        given += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    try:
        return subject.load(options.parse(given))
    except options.DemoError as error:
        raise StudyError(str(error)) from None


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Capture, attend, run the model; print and write."""
    make_directory(args.out, StudyError)
    loaded = load(args)
    layers = capture(loaded.model, loaded.tokens[:, : args.context + args.steps], args.context)
    text, queries = predict(layers, args.draws)
    print(f"{loaded.name}, {args.context} rows of {loaded.text_name}: {text}\n")
    print("Key features touched, %: the model's queries (log-normal ones of their kurtosis)\n")
    print(show_queries(queries), flush=True)
    forced = None
    if args.tokens:
        read = loaded.tokens[:, : args.context + args.tokens]
        forced = Forced(loaded.model, read, args.context)
    configs = [BernoulliConfig(n, shared) for shared in FORMS.values() for n in args.draws]
    sums = {config: Sums() for config in configs}
    for layer in layers:
        exact = attend(layer, args.context, None, 0).out.double()
        for config in configs:
            sums[config].add(layer, exact, args.context, config, args.seeds)
    names = {shared: form for form, shared in FORMS.items()}
    rows: list[Row] = []
    for config in configs:
        row = {"form": names[config.shared], "draws": config.draws, **sums[config].row()}
        rows.append({**row, "tvd": forced.distance(config) if forced else None})
    print(
        "\nDense attention with Bernoulli scores: root mean square over layers, heads, "
        f"{args.steps} queries and {args.seeds} seeds;\nscore noise in units of the logits, "
        f"then without what all rows have in common; TVD over {args.tokens} tokens\n"
    )
    print(show(rows))
    write_csv(args.out / "queries.csv", queries)
    write_csv(args.out / "errors.csv", rows)
    draw(rows, args.out / "bernoulli_model.png")
    print(f"\nwrote {args.out}")


def main(argv: list[str] | None = None) -> int:
    """Run; 1 where there is no such model, text or folder."""
    args = parse(argv)
    try:
        run(args)
    except StudyError as error:
        print(f"bernoulli_model: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
