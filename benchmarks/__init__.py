"""Commands that measure speed beside other systems; nothing in pipejax imports them."""

from pipejax.system import cli

cli.explain_imports()
