"""Faults, one after another, against real runs of a tiny model: kills, damage, signals, full disks, bad input.

python -m lab.faults --json faults.json --table faults.md [--only kills,damage] [--short]
"""
