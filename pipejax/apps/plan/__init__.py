"""Plans a training before it begins: its memory on devices that need not be here, and a dry run of its first step."""
