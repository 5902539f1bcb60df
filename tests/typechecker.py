"""How annotations are checked while testing: an int is a float, as PEP 484 has it."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
