"""The `umbp` command: its global options, its list of commands, and how it ends.

It ends with 0 after success, 1 where something failed or was found to be bad, 2 where the call itself was wrong, 130 after Ctrl-C; and
with one line on standard error that says what to do, never a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from umbp.cli import act, bench, cluster, look, machine, replay
from umbp.cli.target import Target
from umbp.client.address import pool_address
from umbp.errors import ConfigError, InvalidRequest, NotFound, UmbpError

WIDE = {"max_content_width": 120}
app = typer.Typer(name="umbp", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=WIDE)

# Click's usage error, which newer releases of typer carry inside and older ones import: its public subclass is in both.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    pool: Annotated[
        str, typer.Option("--pool", metavar="ADDRESS", help="Unix socket or URL of the pool [UMBP_POOL, or this user's default socket]")
    ] = "",
    token: Annotated[str, typer.Option("--token", envvar="UMBP_TOKEN", show_envvar=True, help="Token, where a URL asks for one")] = "",
    token_file: Annotated[
        str, typer.Option("--token-file", envvar="UMBP_TOKEN_FILE", show_envvar=True, help="File that holds the token")
    ] = "",
) -> None:
    """Look at a pool of KV cache, and act on it. Start one with: python -m umbp.pool"""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
    if token_file and not token:
        try:
            token = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {token_file}: {error}", field="--token-file", example="/etc/umbp/token") from None
    context.obj = Target(pool_address(pool, os.environ), token)


COMMANDS: tuple[Callable[..., None], ...] = (
    look.status,
    look.top,
    look.namespaces,
    look.where,
    look.hot,
    cluster.nodes,
    cluster.drain,
    cluster.route,
    act.evict,
    act.flush,
    act.quota,
    act.pin,
    act.unpin,
    act.pins,
    act.policies,
    machine.doctor,
    bench.bench,
    replay.replay,
)
for command in COMMANDS:
    app.command()(command)


GLOBAL_OPTIONS = ("--pool", "--token", "--token-file")


def hoisted(argv: Sequence[str]) -> list[str]:
    """The global options in front of the command, wherever they were written: ``umbp status --pool X`` is what people type."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word.partition("=")[0] in GLOBAL_OPTIONS:
            value = "" if "=" in word else next(words, None)
            if value is None:
                return [word]  # which is then what is complained about
            front += [word, value] if "=" not in word else [word]
        else:
            rest.append(word)
    return front + rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; its exit status."""
    try:
        status = app(args=hoisted(sys.argv[1:] if argv is None else argv), prog_name="umbp", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        message = getattr(error, "format_message", error.__str__)()
        return _fail(f"{message} (umbp --help lists the commands and options)", 2)
    except UmbpError as error:
        if isinstance(error, NotFound) and "/openapi.json lists what there is" in str(error):
            return _fail(f"{error}. A master answers for its cluster; what a pool holds is asked of the pool: umbp nodes lists them", 1)
        return _fail(str(error), 2 if isinstance(error, InvalidRequest) else 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", 130)
    except BrokenPipeError:  # whoever read our output has seen enough; nothing more can be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def _fail(message: str, status: int) -> int:
    print("umbp:", " ".join(message.split()), file=sys.stderr)
    return status
