"""Commands that train, decode and compare; nothing in pipejax imports them."""

from pipejax.system import cli

cli.explain_imports()
