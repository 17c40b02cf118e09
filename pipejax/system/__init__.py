"""What has nothing to do with T5: commands, files, streams, processes, the shell's settings."""
