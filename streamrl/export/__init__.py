"""Write a plan as launch arguments of another framework, and a schedule of several jobs for Slurm, Ray or Kueue.

Read these files first:

- `launch_file.py`: `export` returns a shell script with one option in each line.
- `option_table.py`: the options of a framework, as profiles/frameworks/options/NAME.toml describes them.
- `planned_values.py`: values and facts of a plan, under the names that these tables use.
- `layout_rules.py`: trainer layouts for which no script is written.
- `job_scripts.py`: a schedule of several jobs as Slurm jobs, Ray jobs or objects of Kueue.

Rules:

- Option names are data, not code. To support a new option, edit the framework's table. To support a new kind of value,
  add it to `planned_values.py`.
- A planned value without an option is listed in comments at the end of the script.
- A script whose options contradict the framework's own rules is not written, nor one for a trainer layout that the
  framework does not have.
"""
