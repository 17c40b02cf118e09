"""JSON schemas: reads a flat schema, compiles it into an automaton over tokens, and writes answers as objects."""
