executable=$$(command -v $name) || { echo "launch.sh: $name is not on PATH; activate the environment it is installed in" >&2; exit 1; }
torchrun=$$(dirname -- "$$executable")/torchrun
[ -x "$$torchrun" ] || torchrun=$$(command -v torchrun) || { echo "launch.sh: torchrun is not on PATH" >&2; exit 1; }
