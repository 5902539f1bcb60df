"""What a comparison leaves to read: ``report.md``, ``report.html`` and PNGs, all drawn from its results."""

from tensorformer.report.page import write_report

__all__ = ["write_report"]
