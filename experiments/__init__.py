"""Commands that train, decode and compare; nothing in pipejax imports them."""
