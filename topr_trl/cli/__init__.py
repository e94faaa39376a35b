"""The command `topr`: its arguments, its help, and the commands that are not stages."""
