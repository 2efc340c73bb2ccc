"""One dataset, open: its check, and its rows as the model takes them.

The check (`checking`) reads every row and every image's header and counts exactly what the rows will need. If bad rows
are to be left out, every image is decoded once, so that a row found good stays good. What the check counted is compared
when a row is prepared: a file that changed is noticed. Does not know segments or messages but its result.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from rollplex.data.checking import RowChecker
from rollplex.data.images import ImageFolder
from rollplex.data.inputs import Prepared
from rollplex.data.lacking import ColumnTally
from rollplex.data.noticed import Noticed
from rollplex.data.preparing import prepare_row
from rollplex.data.processor import Rules, read_rules
from rollplex.data.prompts import PromptMaker
from rollplex.data.rows import Rows, located
from rollplex.data.showing import show_row
from rollplex.data.tokenizer import TextTokenizer
from rollplex.data.videos import videos_of_source
from rollplex.errors import DataError
from rollplex.layout.shape import read_shape
from rollplex.protocol.inputs import DataSource, RowShown, SourceChecked

MAX_REASONS = 1000
MAX_REASON_CHARS = 2000
_UNCHECKED = -1
_REJECTED = -2


class Source:
    """A dataset of one model.

    Raises:
        DataError: the dataset or its image folder cannot be opened.
    """

    def __init__(self, source: DataSource, maker: PromptMaker, rules: Rules) -> None:
        self._source = source
        self._maker = maker
        self._rules = rules
        self._rows = Rows.of(source)
        self._images = ImageFolder(Path(source.image_dir), source.max_image_pixels)
        self._videos = videos_of_source(source, self._images, rules.video.temporal_patch)
        self._checker = RowChecker(
            self._rows,
            self._images,
            self._videos,
            maker=maker,
            rules=rules,
            max_prompt_tokens=source.max_prompt_tokens,
            decode=source.skip_bad_rows,
        )
        self._tokens = np.full(len(self._rows), _UNCHECKED, np.int64)
        self._media_rows = np.zeros(len(self._rows), np.int64)

    def check(self) -> SourceChecked:
        """Check every row.

        Raises:
            DataError: the first bad row, unless bad rows are left out; or no good row at all.
        """
        digest = hashlib.blake2b(self._rows.digest + self._maker.template_digest, digest_size=32)
        reasons: list[str] = []
        noticed, tally = Noticed(), ColumnTally(self._rows.where)
        for number in range(len(self._rows)):
            try:
                facts = self._checker.check(number, digest.update)
                self._tokens[number], self._media_rows[number] = facts.tokens, facts.media_rows
                noticed.add(facts, number)
                tally.add(facts.columns, number, answered=facts.answered)
            except DataError as error:
                if not self._source.skip_bad_rows:
                    raise
                self._tokens[number] = _REJECTED
                reasons.append(str(error)[:MAX_REASON_CHARS])
        self._checker.forget()
        return self._checked(digest.hexdigest(), reasons, noticed.marks(), tally)

    def counted(self, number: int) -> tuple[int, int]:
        """Tokens of a good row's prompt, and of them those that stand for media, as the check counted them."""
        return int(self._tokens[number]), int(self._media_rows[number]) // self._rules.image.merge**2

    def prepare(self, number: int) -> Prepared:
        """Decode, patch and tokenize one row.

        Raises:
            DataError: the row is bad, was rejected, or is not what it was at the check.
        """
        row = self._rows.row(number)
        try:
            prepared = prepare_row(row, self._images, self._videos, self._maker, self._rules)
            self._compare(prepared)
        except DataError as error:
            raise located(error, self._rows.where(number)) from error
        return prepared

    def show(self, number: int) -> RowShown:
        """One row for people; whatever is wrong with it stands in the answer."""
        return show_row(self._rows, number, self._images, self._videos, self._maker)

    def _compare(self, prepared: Prepared) -> None:
        """Raises DataError if a row is not what the check counted."""
        tokens, media_rows = int(self._tokens[prepared.row]), int(self._media_rows[prepared.row])
        found = (len(prepared.prompt.ids), sum(patches.grid.rows for patches in prepared.media))
        if tokens != _UNCHECKED and (tokens, media_rows) != found:
            raise DataError(
                "This row is not what it was when the run began",
                got=f"{found[0]} tokens, {found[1]} pixel rows",
                needed="a rejected row is not used" if tokens == _REJECTED else f"{tokens} and {media_rows}",
                do="Do not change images during a run.",
            )

    def _checked(self, fingerprint: str, reasons: list[str], warnings: list[str], tally: ColumnTally) -> SourceChecked:
        good = np.flatnonzero(self._tokens >= 0)
        if not len(good):
            raise DataError(
                "This dataset has no good row",
                got=f"{len(self._rows)} bad ones, the first: {reasons[0]}",
                where=self._source.path,
            )
        if len(reasons) > MAX_REASONS:
            reasons = [*reasons[: MAX_REASONS - 1], f"… and {len(reasons) - MAX_REASONS + 1} more"]
        most_rows = int(self._media_rows[good].max())
        return SourceChecked(
            name=self._source.name,
            fingerprint=fingerprint,
            num_rows=len(self._rows),
            good_rows=None if len(good) == len(self._rows) else tuple(good.tolist()),
            rejected=tuple(reasons),
            max_prompt_tokens=int(self._tokens[good].max()),
            max_media_rows=most_rows,
            max_media_tokens=most_rows // self._rules.image.merge**2,
            warnings=tuple(warnings),
            columns=tally.columns(),
            answers=tally.answers,
            place=tally.place,
        )


def open_source(source: DataSource, folder: Path, tokenizer: TextTokenizer) -> Source:
    """Open a dataset for the model of a folder.

    Args:
        source: the dataset.
        folder: the model's.
        tokenizer: the model's, which takes a while to read.

    Raises:
        DataError: the dataset or its image folder cannot be opened.
        ModelError: a model folder that cannot be used.
        ConfigError: options that cannot be used, or a package that is not installed.
    """
    maker, rules = model_of(source, folder, tokenizer)
    return Source(source, maker, rules)


def model_of(source: DataSource, folder: Path, tokenizer: TextTokenizer) -> tuple[PromptMaker, Rules]:
    """How a model takes the prompts and images of a dataset. Raises ModelError and ConfigError as `open_source`."""
    shape = read_shape(folder)
    template = Path(source.chat_template) if source.chat_template else None
    maker = PromptMaker(tokenizer, shape, template)
    return maker, read_rules(folder, shape, min_pixels=source.min_pixels, max_pixels=source.max_pixels)
