"""Commands that measure speed beside other systems; nothing in pipejax imports them."""
