"""``tensorformer study``: what the studies are called."""

from __future__ import annotations

from typing import Annotated

import tyro

from tensorformer.cli.study_numerics import Numerics
from tensorformer.cli.study_precision import PrecisionOfActivations
from tensorformer.cli.study_ranges import Ranges
from tensorformer.cli.study_routing import Routing

Study = (
    Annotated[Numerics, tyro.conf.subcommand("numerics")]
    | Annotated[PrecisionOfActivations, tyro.conf.subcommand("precision")]
    | Annotated[Ranges, tyro.conf.subcommand("ranges")]
    | Annotated[Routing, tyro.conf.subcommand("routing")]
)
