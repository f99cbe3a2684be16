# For the run.sh of experiments, which read it from the repository's root: what is there is not made again.

made() { # FILE COMMAND: run where the file that it writes is not there
    wanted=$1
    shift
    [ -e "$wanted" ] || "$@"
}

saved() { # FILE COMMAND: its output, unless it is there
    wanted=$1
    shift
    [ -f "$wanted" ] || { "$@" >"$wanted.part" && mv "$wanted.part" "$wanted"; }
}
