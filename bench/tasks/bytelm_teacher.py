"""Serves the byte GPT of a file that bytelm.py --save has written: students are bytelm.py --teacher-weight.

ps-teach --bind tcp://0.0.0.0:5570 --keys DIR bench/tasks/bytelm_teacher.py FILE
"""

import argparse

from bytelm import saved

from narrows.worker import teacher

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a byte GPT as a teacher.")
    parser.add_argument("file", metavar="FILE", help="that bytelm.py --save has written")
    teacher.serve(saved(parser.parse_args().file))
