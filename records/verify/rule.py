"""What a rank follows from: the scores of a judging's rooms, and the best record before it.

The rooms are told of by a work folder, or by the verdict that was kept of them. So the rule is applied once
more where another record stands before, and nothing is trained again.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from records.archive.checks import Check, check, note, skip
from records.archive.judgings import number_of, read_draws
from records.archive.ranks import Rival, gain_over, is_priced, judged_seeds
from records.archive.record import Record
from records.archive.verdicts import ROOMS, folder_sha256, read_verdicts

RULE = {"gain", "machine"}  # the checks of this file: another record before it, another answer
KIND = ("processor", "gpu")  # of a machine, where seconds count


@dataclass(frozen=True)
class Evidence:
    """What came out of a judging's rooms: all that a rank rests on, beside the script."""

    seeds: dict[str, dict]  # of each what a verdict keeps
    judging: int  # its place among those of the folder, each of which is paid for
    referee: str  # its version, as the rooms were judged
    track: str  # sha256 of the rules then
    machine: dict[str, str]

    @property
    def scores(self) -> list[float]:
        return [its["score"] for its in self.seeds.values() if "score" in its]

    @property
    def complete(self) -> bool:
        return len(self.scores) == len(self.seeds)


def kept_evidence(record: Record) -> Evidence | None:
    """What a kept verdict says of the folder's last judging, if only the rule is left to be applied."""
    its = read_verdicts(record.track.folder).get(record.name, {})
    its |= its.get(ROOMS, {})
    seeds = judged_seeds(its)
    draws = read_draws(record.track.folder)
    newest = [draw.seeds for draw in draws if draw.folder == record.name][-1:]
    if not seeds or its["sha256"] != folder_sha256(record.path) or newest not in ([], [seeds]):
        return None
    if {*its["failed"], *its.get("left", ())} - RULE:
        return None
    found = Evidence(
        its["judged"]["seeds"],
        number_of(draws, record.name, its["sha256"], seeds),
        its["referee"],
        its["track"],
        its["machine"],
    )
    return found if found.complete else None


def compare_claims(record: Record, scores: list[float]) -> Check:
    """Whether the submission's scores lie where the judged ones do: a row, not a gate."""
    claims = [*record.scores.values()]
    noise = record.track["noise_bpb"]
    near = min(scores) - noise <= min(claims) and max(claims) <= max(scores) + noise
    return note(
        "claims",
        f"the submission's scores lie from {min(claims):.6f} to {max(claims):.6f}, the judged ones from "
        f"{min(scores):.6f} to {max(scores):.6f}: {'alike' if near else 'NOT ALIKE'} within {noise:g}",
    )


def check_rank(record: Record, found: Evidence, rival: Rival | None) -> Iterator[Check]:
    """The track's rule, over the best record before it that stands now."""
    if record.field("claim") == "none":
        yield note("gain", "claims nothing")
        return
    if rival is None:
        yield check("gain", True, "no record stands before it, expected so or a gain over the best one")
        return
    machine, theirs = ({name: one.get(name) for name in KIND} for one in (found.machine, rival.machine))
    if not record.track.counts_flops and machine != theirs:
        text = f"seconds count, and {rival.name} was judged on {theirs}, this one on {machine}"
        yield skip("machine", text)
        return
    gain = gain_over(rival, found.scores, record, found.judging, is_priced(found.referee))
    yield check("gain", gain.enough, f"over {rival.name}, by the judged scores of both: {gain}")


def kept_fields(record: Record, found: Evidence, rival: Rival | None) -> dict:
    """What the verdict keeps of a judging."""
    judged = {"seeds": found.seeds, "mean": statistics.fmean(found.scores) if found.scores else None}
    if found.complete and rival and record.field("claim") != "none":
        gain = gain_over(rival, found.scores, record, found.judging, is_priced(found.referee))
        judged |= {"beats": rival.name, "gain": gain.bpb, "least": gain.least, "p": gain.p}
        judged["alpha"] = gain.below
    return {"judged": judged, "referee": found.referee, "track": found.track, "machine": found.machine}
