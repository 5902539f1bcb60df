"""The tokens that a study of a run reads: its validation part, or texts named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # --help loads no torch
    import numpy as np

    from tensorformer.config.schema import Run
    from tensorformer.data.tokenizer import Tokenizer

    Tokens = np.ndarray


def run_tokens(folder: Path, run: Run, tokenizer: Tokenizer, text: tuple[str, ...], limit: int) -> Tokens:
    """Return the run's validation part, or, where texts are given, their first ``limit`` + 1 tokens."""
    return _read(run, tokenizer, text, limit) if text else _validation(folder, run)


def _read(run: Run, tokenizer: Tokenizer, text: tuple[str, ...], limit: int) -> Tokens:
    """Return the first tokens of the texts, the end of a document before and behind each."""
    import numpy as np

    from tensorformer.config.schema import Data
    from tensorformer.data.corpus import documents
    from tensorformer.errors import DataError

    end = np.array([tokenizer.end_of_document])
    pieces, count = [end], 1
    try:
        for document in documents(Data(source=text, text_field=run.data.text_field)):
            ids = tokenizer.encode_batch([document.text])[0]
            tokenizer.refuse_end(ids, document.name)
            pieces += [ids, end]
            count += len(ids) + 1
            if count > limit:
                break
    except DataError as e:
        raise DataError(str(e).replace("data.source", "--text")) from None
    return np.concatenate(pieces)[: limit + 1].astype(np.uint32)


def _validation(folder: Path, run: Run) -> Tokens:
    from tensorformer.data.prepare import prepare
    from tensorformer.errors import CheckpointError, DataError
    from tensorformer.lab.record import check_claim

    mend = "name a text to read with --text"
    try:
        corpus = prepare(run.data)
    except DataError as e:
        raise DataError(f"{e}; or {mend}") from None
    try:
        check_claim(folder, run, corpus.fingerprint)
    except CheckpointError:
        raise CheckpointError(f"{folder}: the text it was trained on has changed since; {mend}") from None
    return corpus.validation.tokens
