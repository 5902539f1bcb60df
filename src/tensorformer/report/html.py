"""What every page is made with: templates that escape, and a policy for the case that one did not."""

from __future__ import annotations

import base64
import hashlib

import jinja2

from tensorformer.report import escape


def environment(autoescape: bool) -> jinja2.Environment:
    """Return the templates; those of HTML escape whatever is put in."""
    loader = jinja2.PackageLoader("tensorformer.report", "templates")
    found = jinja2.Environment(
        loader=loader,
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=not autoescape,
    )
    found.filters["md"] = escape.markdown
    return found


def policy(scripts: list[str]) -> str:
    """Return a policy under which only these scripts run and nothing is loaded, should an escape ever be missed."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
