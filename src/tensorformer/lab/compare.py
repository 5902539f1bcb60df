"""A comparison: plan, choose learning rates, train what is missing, time, and put the results together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensorformer.config.check import check_train
from tensorformer.config.load import run_hash
from tensorformer.config.schema import Compare, Recipe, WarmupStableDecay
from tensorformer.data.examples import Examples, open_examples
from tensorformer.errors import CheckpointError, DivergenceError, TensorformerError
from tensorformer.files import write_bytes
from tensorformer.lab import record
from tensorformer.lab.assemble import Cost, assemble, machine
from tensorformer.lab.device import pick
from tensorformer.lab.memory import training_peaks
from tensorformer.lab.optim import n_steps
from tensorformer.lab.plan import Planned, check_fits
from tensorformer.lab.pool import Event, Task, run_all
from tensorformer.lab.results import FORMAT, Comparison, SeedResult
from tensorformer.lab.timing import step_seconds

RESULTS = "results.json"
TIMING_ROUNDS = 9
BUDGETS = (0.5, 1.0, 2.0)  # of the tokens: the baseline's curve for data-to-match


class Watcher(NamedTuple):
    """What a comparison tells while it works."""

    on_tasks: Callable[[list[Task]], None] = lambda tasks: None  # about to be trained
    on_event: Callable[[Event], None] = lambda event: None
    on_timing: Callable[[int, int], None] = lambda done, of: None


def compare(
    recipe: Recipe,
    planned: list[Planned],
    root: Path,
    device: str,
    jobs: int,
    watcher: Watcher = Watcher(),  # noqa: B008
    recipe_path: str = "",
) -> Comparison:
    """Run what is missing of a comparison and return its results, written to ``results.json`` as well.

    Args:
        recipe: with a ``[compare]`` table.
        planned: its variants, as ``plan`` returns them.
        root: folder of all runs; this one's is ``root / recipe.name``.
        device: by name, ``"auto"`` for the best there is.
        jobs: runs trained side by side.
        watcher: told of progress.
        recipe_path: where the recipe was read from, for the page to say.

    Raises:
        TensorformerError: a run failed; the others were trained all the same, and are kept.
        KeyboardInterrupt: all runs have stopped at a checkpoint.
    """
    assert recipe.compare is not None
    folder, examples = root / recipe.name, open_examples(recipe.data)
    check_fits(examples, planned, recipe.compare.contexts)
    lab = _Lab(recipe, recipe.compare, examples, folder, device, jobs, watcher)
    lab.train_grid(planned)
    grids = {p.name: lab.grid(p) for p in planned}
    chosen = [_at_rate(p, _best(p, grids[p.name])) for p in planned]
    lab.train_all(chosen)
    runs = {p.name: list(lab.results(p).values()) for p in chosen}
    conditions = {"runs side by side": str(jobs), "device": str(pick(device))}
    comparison = assemble(
        recipe, recipe_path, examples, chosen, runs, grids, lab.curve(chosen[0]), lab.cost(chosen), conditions
    )
    write_bytes(folder / RESULTS, msgspec.json.format(msgspec.json.encode(comparison)))
    return comparison


def read_results(folder: Path) -> Comparison:
    """Read what a finished comparison found."""
    path = folder / RESULTS
    try:
        comparison = msgspec.json.decode(path.read_bytes(), type=Comparison)
        if comparison.format != FORMAT:
            raise CheckpointError(f"{path}: written by another release; run `tensorformer compare` again")
        return comparison
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not there; `tensorformer compare` writes it when all runs have finished"
        ) from None
    except (OSError, msgspec.DecodeError) as e:
        raise CheckpointError(f"{path}: unreadable ({e}); run `tensorformer compare` again to write it anew") from None


class _StoredCost(msgspec.Struct, frozen=True):
    key: dict[str, str | dict[str, str]]
    cost: dict[str, Cost]


class _Lab:
    """The folder of one comparison, and how runs get into it."""

    def __init__(
        self,
        recipe: Recipe,
        compare: Compare,
        examples: Examples,
        folder: Path,
        device: str,
        jobs: int,
        watcher: Watcher,
    ) -> None:
        self.recipe, self.compare, self.examples, self.folder = recipe, compare, examples, folder
        self.device, self.jobs, self.watcher = device, jobs, watcher

    def run_folder(self, p: Planned, seed: int, tokens: int | None = None) -> Path:
        """Return where a run lives; the plain ``variant/seed-n`` unless rates or lengths are varied."""
        parts = [p.name]
        if self.compare.learning_rates:
            parts.append(f"lr-{p.run.train.optimizer.lr:g}")
        if tokens is not None and tokens != p.run.train.tokens:
            parts.append(f"tokens-{tokens}")
        return self.folder.joinpath(*parts, f"seed-{seed}")

    def task(self, p: Planned, seed: int, tokens: int | None = None, branch_from: Path | None = None) -> Task:
        run = p.at_seed(seed)
        if tokens is not None:
            run = msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, tokens=tokens))
        folder = self.run_folder(p, seed, tokens)
        label = str(folder.relative_to(self.folder))
        return Task(label, run, folder, self.compare.contexts, bool(self.compare.learning_rates), branch_from)

    def train_grid(self, planned: list[Planned]) -> None:
        """Train every variant at every learning rate of the grid, at the first seed."""
        seed = self.compare.seeds[0]
        tasks = [self.task(_at_rate(p, lr), seed) for lr in self.compare.learning_rates for p in planned]
        self._train([[t] for t in tasks], grid=True)
        for p in planned:
            if self.compare.learning_rates and not self.grid(p):
                raise DivergenceError(f"{p.name}: diverged at every learning rate of the grid; add lower ones")

    def grid(self, p: Planned) -> dict[float, float]:
        """Return learning rate -> loss on the tuning part, without those at which the variant diverged."""
        results = {
            lr: record.read_result(self.run_folder(_at_rate(p, lr), self.compare.seeds[0]))
            for lr in self.compare.learning_rates
        }
        return {lr: r.tuning_loss for lr, r in results.items() if r and r.tuning_loss is not None}

    def train_all(self, chosen: list[Planned]) -> None:
        """Train every variant at every seed, and the baseline at the budgets of its curve."""
        chains = []
        for seed in self.compare.seeds:
            for p in chosen:
                budgets = self._budgets() if p.name == self.compare.baseline else [self.recipe.train.tokens]
                chain: list[Task] = []
                for tokens in budgets:
                    branches = isinstance(p.run.train.schedule, WarmupStableDecay)
                    trunk = chain[-1].folder if chain and branches else None
                    chain.append(self.task(p, seed, tokens, trunk))
                chains.append(chain)
        self._train(chains)

    def cost(self, chosen: list[Planned]) -> dict[str, Cost]:
        """Return what a step of each variant takes, as measured before if the same ones were, on this machine."""
        path, runs = self.folder / "cost.json", {p.name: p.run for p in chosen}
        hashes = {name: run_hash(run) for name, run in runs.items()}
        key = {"machine": machine(), "device": str(pick(self.device)), "runs": hashes}
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=_StoredCost)
            if stored.key == key:
                return stored.cost
        except (OSError, msgspec.DecodeError):
            pass  # it is measured anew
        peaks = training_peaks(runs, self.device)
        seconds = step_seconds(runs, self.examples, pick(self.device), TIMING_ROUNDS, self.watcher.on_timing)
        cost = {name: Cost(seconds[name], peaks[name]) for name in runs}
        write_bytes(path, msgspec.json.encode(_StoredCost(key, cost)))
        return cost

    def results(self, p: Planned, tokens: int | None = None) -> dict[int, SeedResult]:
        return {s: record.seed_result(self.run_folder(p, s, tokens), s) for s in self.compare.seeds}

    def curve(self, baseline: Planned) -> dict[int, dict[int, float]]:
        """Return seed -> tokens -> the baseline's final loss; empty without data-to-match."""
        if not self.compare.data_to_match:
            return {}
        losses = {t: self.results(baseline, t) for t in self._budgets()}
        return {s: {t: losses[t][s].loss for t in losses} for s in self.compare.seeds}

    def _settled(self, task: Task, grid: bool) -> bool:
        if grid and record.diverged(task.folder):
            return True
        lengths = [task.run.train.context * c for c in task.contexts]
        return record.finished(task.folder, lengths, task.tuning) is not None

    def _budgets(self) -> list[int]:
        """Return the tokens at which the baseline is trained: whole steps."""
        train = self.recipe.train
        if not self.compare.data_to_match:
            return [train.tokens]
        per_step = train.batch_size * train.context
        return [int(n_steps(train) * b) * per_step for b in BUDGETS]

    def _train(self, chains: list[list[Task]], grid: bool = False) -> None:
        """Train what is missing; in a grid, a run that diverges is an answer and not a failure."""
        tasks = [t for chain in chains for t in chain]
        for task in tasks:  # before any work is done
            check_train(task.run.train)
            record.check_claim(task.folder, task.run, self.examples.fingerprint)
        missing = [[t for t in chain if not self._settled(t, grid)] for chain in chains]
        missing = [chain for chain in missing if chain]
        self.watcher.on_tasks([t for chain in missing for t in chain])
        failed = run_all(missing, self.jobs, self.device, self.watcher.on_event)
        fatal = [e for e in failed.values() if not (grid and e.kind == "diverged")]
        if fatal:
            more = f" (and {len(fatal) - 1} more)" if len(fatal) > 1 else ""
            error = DivergenceError if fatal[0].kind == "diverged" else TensorformerError
            raise error(f"{fatal[0].message}{more}") from (Exception(fatal[0].details) if fatal[0].details else None)


def _best(p: Planned, grid: dict[float, float]) -> float:
    """Return the learning rate with the least loss on the tuning part; without a grid, the recipe's own."""
    return min(grid, key=lambda lr: grid[lr]) if grid else p.run.train.optimizer.lr


def _at_rate(p: Planned, lr: float) -> Planned:
    optimizer = msgspec.structs.replace(p.run.train.optimizer, lr=lr)
    train = msgspec.structs.replace(p.run.train, optimizer=optimizer)
    return p._replace(run=msgspec.structs.replace(p.run, train=train))
