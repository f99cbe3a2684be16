"""The one exception that means "the user can mend this"."""


class UserError(Exception):
    """Bad input: one line that names the value, the place and the remedy.

    The command line prints it alone and exits with code 2; anything else is a defect of ours and keeps its traceback.
    """
