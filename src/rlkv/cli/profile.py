"""``rlkv profile``: look into head profiles, import published scores, make the peers' profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from rlkv.cli.output import print_rows
from rlkv.cli.profile_make import Duo, KVzip

if TYPE_CHECKING:
    from rlkv.core.head_profile import HeadProfile


@dataclass(frozen=True)
class Show:
    """Say what a profile is, and draw its scores as text."""

    path: tyro.conf.Positional[Path]
    """Head profile."""
    json: bool = False
    """Print a JSON list of one row on stdout instead."""

    def run(self) -> int:
        """Prints; returns the exit status."""
        from rlkv.core.head_profile import HeadProfile

        profile = HeadProfile.load(self.path)
        facts = _facts(profile)
        if self.json:
            print_rows([facts], as_json=True)
            return 0
        width = max(len(name) for name in facts)
        for name, value in facts.items():
            print(f"{name:{width}}  {value}")
        print()
        for layer, row in enumerate(profile.scores.tolist()):
            print(f"layer {layer:3}  " + " ".join(f"{score:.2f}" for score in row))
        return 0


@dataclass(frozen=True)
class Heads:
    """List every KV head with its score, best first, and whether it stays full."""

    path: tyro.conf.Positional[Path]
    """Head profile."""
    sparsity: float = 0.5
    """Share of KV heads to compress, in [0, 1)."""
    rule: Literal["exact", "quantile"] = "exact"
    """How full heads are chosen; quantile is the authors' rule."""
    json: bool = False
    """Print one JSON list of rows {layer, kv_head, score, full} on stdout instead of a table."""

    def run(self) -> int:
        """Prints; returns the exit status."""
        from rlkv.core.head_profile import HeadProfile

        profile = HeadProfile.load(self.path)
        full = profile.full_heads(self.sparsity, self.rule)
        rows = [
            {
                "layer": layer,
                "kv_head": kv_head,
                # nine digits identify a float32 exactly
                "score": float(f"{profile.scores[layer, kv_head]:.9g}"),
                "full": bool(full[layer, kv_head]),
            }
            for layer, kv_head in profile.ranking()
        ]
        print_rows(rows, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Import:
    """Turn a published score table into a profile of a model; prints the file written."""

    table: tyro.conf.Positional[Path]
    """Tab-separated scores: one row a layer, one column a KV head, no header."""
    model: str
    """Model that the scores belong to: a name, a local folder, or a hub id."""
    out: Path
    """Profile to write."""
    source: str | None = None
    """Method that made the scores; default: the table's file name."""

    def run(self) -> int:
        """Imports and prints the path; returns the exit status."""
        from rlkv.core.files import require_writable
        from rlkv.core.import_scores import import_scores
        from rlkv.hf.sources import resolve_model

        require_writable(self.out)
        resolve_model(self.model)

        from rlkv.hf.loading import model_spec

        profile = import_scores(self.table, model_spec(self.model), source=self.source)
        profile.save(self.out)
        print(self.out)
        return 0


@dataclass(frozen=True)
class Profile:
    """Look into head profiles, import published scores, and make the peers' profiles."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Import, tyro.conf.subcommand("import")]
        | Annotated[Heads, tyro.conf.subcommand("heads")]
        | Annotated[Duo, tyro.conf.subcommand("duo")]
        | Annotated[KVzip, tyro.conf.subcommand("kvzip")]
    ]

    def run(self) -> int:
        """Runs the chosen command; returns the exit status."""
        return self.command.run()


def _facts(profile: HeadProfile) -> dict[str, str | int | float | bool | None]:
    spec = profile.spec
    return {
        "model": spec.model_id,
        "revision": spec.revision,
        "layers": spec.num_layers,
        "kv_heads": spec.num_kv_heads,
        "source": profile.source,
        "sink": profile.sink,
        "recent": profile.recent,
        "mean_score": float(profile.scores.mean()),
        "share_over_half": float((profile.scores > 0.5).mean()),
        **{f"meta.{name}": value for name, value in profile.meta.items()},
    }
