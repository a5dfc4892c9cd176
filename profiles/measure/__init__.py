"""The profiler: matrix products, attention, memory traffic, launches, links and whole layers, timed on the machine at hand.

``machine.profile_machine`` measures this machine and writes a cluster; ``gpu.measure_gpu``, ``links.measure_links`` and
``layer.measure_layer`` are its parts. Torch is imported by the functions that measure, never by importing this package.
"""
