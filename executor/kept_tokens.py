"""What earlier legs of a run left of rollouts that no checkpoint has in it: tokens that a resumed run goes on from.

A version after the checkpoint's is made again, with other weights: what the lost one sampled is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from streamrl.executor.samples import Completion
from streamrl.executor.token_files import remove_files, take_over


class KeptTokens:
    """Owns a directory of token files between two legs of a run."""

    def __init__(
        self, directory: Path, newest: int, max_tokens: int, is_open: Callable[[int], bool]
    ) -> None:
        """Sort out what is there: what can be gone on with becomes attempts that have ended, the rest is removed.

        Args:
            directory: of the files; see `streamrl.executor.token_files`.
            newest: the version that the run resumes at.
            max_tokens: most output tokens of a rollout.
            is_open: whether a rollout is still to be trained on.
        """
        self._attempts: dict[int, list[Completion]] = {}
        for rollout, paths in sorted(_find(directory).items()):
            attempts = list(_take_over(rollout, paths, newest)) if is_open(rollout) else []
            if 0 < sum(each.output.num_tokens for each in attempts) <= max_tokens:
                self._attempts[rollout] = attempts
            else:
                _remove(paths)

    @property
    def num_rollouts(self) -> int:
        """Rollouts of which something is left."""
        return len(self._attempts)

    @property
    def num_tokens(self) -> int:
        """Output tokens of them."""
        return sum(each.output.num_tokens for kept in self._attempts.values() for each in kept)

    def take(self, rollout: int, oldest_version: int) -> list[Completion]:
        """Return the attempts that are left of a rollout, in order; none where it began under a version that is too old."""
        attempts = self._attempts.pop(rollout, [])
        if attempts and attempts[0].versions[0][0] < oldest_version:
            _remove([str(each.output.path) for each in attempts])
            return []
        return attempts


def remove_all(directory: Path) -> None:
    """Remove the files of every attempt, and the directory unless somebody else keeps something there."""
    for paths in _find(directory).values():
        _remove(paths)
    with suppress(OSError):
        directory.rmdir()


def _find(directory: Path) -> dict[int, list[str]]:
    """Return the files of each rollout's attempts, in order."""
    found: dict[int, dict[int, str]] = defaultdict(dict)
    for path in directory.glob("*.*"):
        numbers = path.name.removesuffix(".part").removesuffix(".new").split(".")
        is_ours = len(numbers) == 2 and all(each.isdecimal() for each in numbers)
        if is_ours and path.is_file():
            rollout, attempt = map(int, numbers)
            found[rollout][attempt] = str(path.with_name(f"{rollout}.{attempt}"))
    return {rollout: [of[n] for n in sorted(of)] for rollout, of in found.items()}


def _take_over(rollout: int, paths: list[str], newest: int) -> Iterator[Completion]:
    """Yield the attempts that follow each other from the rollout's first token on, up to where something is missing."""
    num_tokens, is_going_on = 0, True
    for path in paths:
        attempt = take_over(rollout, path, num_tokens, newest) if is_going_on else None
        if attempt is None:
            remove_files(path)
            is_going_on = False
            continue
        yield attempt
        num_tokens += attempt.output.num_tokens
        is_going_on = attempt.finish == "aborted"


def _remove(paths: list[str]) -> None:
    for path in paths:
        remove_files(path)
