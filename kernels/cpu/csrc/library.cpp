// All that is compiled, as one unit: four would read the processor's intrinsics four times, which is most of the time.
#include "attending.cpp"
#include "decoder.cpp"
#include "interface.cpp"
#include "packing.cpp"
