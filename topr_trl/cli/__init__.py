"""Command line of the package: parse the settings of `topr COMMAND`, print help, and run the command."""
