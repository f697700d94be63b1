"""Fit speed factors to the steps of a real cluster, so that simulations predict it better.

Files to read first:

- `disagreement.py`: compares the work of the run file with the measured work.
- `simulated_steps.py`: simulates the measured steps, each with its own lengths.
- `calibrate.py`: fits a factor per stage and the seconds of a step outside its stages.

A factor must not hide an error in the run file. So nothing is fitted if the run file and the
measurements disagree. The last steps are held out to show how well the factors hold.
"""
