"""Write one page about a folder of rows, a training run, a loop, a trial, an evaluation or a recording."""
