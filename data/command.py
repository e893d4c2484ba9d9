"""What the three commands share: errors and their exit codes, arguments, and output that nobody reads."""

import argparse
import errno
import functools
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

REPO = Path(__file__).resolve().parent.parent
OUTPUT_CLOSED = 141  # as a shell reports a program whose reader went away (128 + SIGPIPE)
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended (128 + SIGINT)


class DataError(Exception):
    """The data are not what they should be: exit code 3."""

    exit_code = 3


class UsageError(Exception):
    """The command was called with something impossible: exit code 2."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """A parser of arguments that reports an error in one line.

    It describes a command by the first line of its docstring, which python -OO takes away.
    """

    def __init__(self, *args, description: str | None = None, **options):
        super().__init__(*args, description=(description or "").partition("\n")[0], **options)

    def error(self, message: str):
        self.exit(2, f"error: {message}; {self.prog} --help explains the arguments\n")


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument that counts something: plain digits, `least` or more."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number of {least} or more")
        return int(text)

    return parse


def fraction(text: str) -> float:
    """The type of an argument that is a share of something: above 0 and below 1."""
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", text) or not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a number between 0 and 1, such as 0.01")
    return float(text)


def utf8(text: str) -> str:
    """The type of an argument that is text: in the C locale Python itself makes none of other than ASCII."""
    return os.fsencode(text).decode("utf-8")


def open_streams() -> None:
    """Give standard streams that the caller closed a place, and let all of them take any text.

    Otherwise the next file to be opened would get the number of the closed stream, and its messages too.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(errors="backslashreplace")  # in the C locale a stream takes ASCII alone


def printable(text: object) -> str:
    """One line without control characters, so that no stranger's text looks like another line of ours."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def some(names: Sequence[str]) -> str:
    """The first ten, and how many more there are."""
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def say(line: str) -> None:
    """Print what has been done, or what is going to take a while."""
    print(line, flush=True)


@functools.cache
def warn_once(line: str) -> None:
    print(f"warning: {printable(line)}", file=sys.stderr, flush=True)


def on_signals(handler: Callable, *numbers: int) -> None:
    """Python takes signals in its main thread alone; a command in another one leaves them as they are."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal's handler: KeyboardInterrupt, but a moment later within an import, which may swallow it."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def run(work: Callable[[], int], mend: str) -> int:
    """The exit code of `work()`. An error is one line on stderr; a system's error ends with `mend`.

    SIGTERM ends it as Ctrl-C does, so that nothing half-written stays behind.
    """
    on_signals(interrupt, signal.SIGTERM)
    try:
        code = work()
        sys.stdout.flush()
        return code
    except (DataError, UsageError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still holds and writes at its end
        return OUTPUT_CLOSED
    except OSError as error:
        first = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend this"
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror or error}: {first}, then {mend}", file=sys.stderr)
        return DataError.exit_code


def main(
    parse_args: Callable[[list[str] | None], argparse.Namespace],
    work: Callable[[argparse.Namespace], int],
    mend: str,
    argv: list[str] | None,
) -> int:
    """A command from its arguments to its exit code; `mend` is what to do once a system's error is mended."""
    open_streams()
    args = parse_args(argv)
    return run(lambda: work(args), mend)


def training_command(dataset: Path, tokenizer: Path, vocab_size: int | None) -> str:
    """The command line that trains on a dataset, for the folder that the user is in."""
    settings = [f"VOCAB_SIZE={vocab_size}"] if vocab_size else []
    settings += [f"DATA_PATH={shell(dataset)}", f"TOKENIZER_PATH={shell(tokenizer)}"]
    return " ".join([*settings, shell(Path(sys.executable or "python"), REPO / "train_gpt.py")])


def shell(*words: object) -> str:
    """Words of a command for a shell, quoted; a path is relative where it lies below the working folder.

    What no terminal shows is written in bytes, so that the command stays on its line.
    """
    return " ".join(quoted(near(word) if isinstance(word, Path) else str(word)) for word in words)


def quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"


def near(path: Path) -> str:
    found = os.path.relpath(path)
    return str(path.absolute()) if found.startswith(("..", "-")) else found
