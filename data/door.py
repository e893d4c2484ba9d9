"""The door of a package: a table of commands, and what they share. Help, errors, exit codes and signals."""

import difflib
import errno
import importlib
import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import click

from data.command import REPO, DataError, UsageError, open_streams, printable, shell

OUTPUT_CLOSED = 141  # as a shell reports a program whose reader went away (128 + SIGPIPE)
INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended (128 + SIGINT)
STOPS = signal.SIGINT, signal.SIGTERM


# --- types of arguments, beside click's own ---------------------------------------------------------------


def text(word: str) -> str:
    """The type of an argument that is text: in the C locale Python itself makes none of other than ASCII."""
    return os.fsencode(word).decode("utf-8")


class Number(click.FloatRange):
    """The type of an argument that is a finite number; a comparison lets nan through."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} given, expected a finite number", param, ctx)
        return number


# --- commands ---------------------------------------------------------------------------------------------


class Command(click.Command):
    """A command. Its help stands line by line as it is written, since it holds commands to copy."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{inspect.cleandoc(self.help or '')}\n")  # python -OO takes docstrings away

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser of words does not say whose they are
            raise


class Commands(Command, click.Group):
    """A command with commands of its own, which it lists where none is named."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])


class Door(Commands):
    """A package's commands, by a table: name, the place module:function, and what it does.

    A module is imported when its command is called: many of them import torch or pyarrow.
    """

    def __init__(self, package: str, table: dict[str, tuple[str, str]], about: str | None):
        settings = {"show_default": True, "terminal_width": 110}
        super().__init__(f"python -m {package}", help=about, context_settings=settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.table]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.table:
            near = difflib.get_close_matches(name, self.table, 1)
            return ctx.fail(f"no command {name!r}; the nearest is {near[0]}") if near else None
        module, _, function = self.table[name][0].partition(":")
        return getattr(importlib.import_module(module), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in self.table.items()])

    def obey(self, argv: list[str] | None) -> int:
        """Carry out what the arguments ask for; the exit code."""

        def work() -> int:
            with self.make_context(self.name, sys.argv[1:] if argv is None else [*argv]) as ctx:
                return self.invoke(ctx)

        open_streams()
        handlers = {number: signal.getsignal(number) for number in STOPS}
        try:
            return run(work)
        finally:
            for number, handler in handlers.items() if argv is not None else ():
                on_signals(handler, number)  # of the program that called this, and goes on


# --- from a command to its exit code ----------------------------------------------------------------------


def on_signals(handler: Callable, *numbers: int) -> None:
    """Python takes signals in its main thread alone; a command in another one leaves them as they are."""
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal's handler: KeyboardInterrupt, but a moment later within an import, which may swallow it.

    Later signals are ignored: they would cut off what the first one lets a command put away.
    """
    on_signals(signal.SIG_IGN, *STOPS)
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def run(work: Callable[[], int]) -> int:
    """The exit code of `work()`. An error is one line on stderr.

    SIGTERM ends it as Ctrl-C does, so that nothing half-written stays behind. Both do so also for what a
    shell runs with &.
    """
    on_signals(interrupt, *STOPS)
    try:
        code = work()
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as ended:  # of --help
        return ended.exit_code
    except click.UsageError as error:
        words = printable(error.format_message().rstrip("."))
        print(f"error: {words}; {error.ctx.command_path} --help explains the arguments", file=sys.stderr)
        return error.exit_code
    except (DataError, UsageError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        mend = shell(sys.executable, "-m", "pip", "install", "-r", REPO / "tests/requirements.txt")
        print(f"error: {error.name} is not installed: {mend}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still holds and writes at its end
        return OUTPUT_CLOSED
    except OSError as error:
        first = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend this"
        where = f"{error.filename}: " if error.filename else ""
        words = f"{where}{error.strerror or error}: {first}, then run the same command again"
        print(f"error: {words}", file=sys.stderr)
        return DataError.exit_code
