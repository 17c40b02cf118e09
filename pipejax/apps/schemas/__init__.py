"""JSON schemas: reads a flat schema, compiles it into an automaton over tokens, and converts answers to objects."""
