"""What a layout costs: operations, FLOPs, memory, time, communication."""
