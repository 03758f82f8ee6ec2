"""`make bench`: is this tree slower than the one that it came from, stage by stage?

stages.py and gpu_stages.py are the stages, and side.py is the process that runs one tree's. compare.py asks two such
processes by turns. base.py finds the other tree. bench_stages.py gives the stages to pytest-benchmark.
"""
