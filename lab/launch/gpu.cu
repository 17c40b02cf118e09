// A launch on a GPU. All parameters are pointers, since XLA passes no others; their number is a macro of the compiler.
#include "decode.h"

extern "C" __global__ void __launch_bounds__(launch::kThreads, 1) pipejax_launch(PARAMETERS) {
  __shared__ launch::Room room;
  if (threadIdx.x == 0) {
    const void* const pointers[] = {POINTERS};
    UNROLL(1000)
    for (int i = 0; i < int(sizeof pointers / sizeof *pointers); ++i) room.pointers[i] = pointers[i];
    room.numbers = *static_cast<const launch::Numbers*>(pointers[0]);
  }
  __syncthreads();
  launch::Decode<launch::Bfloat16>(room, blockIdx.x, gridDim.x, SCRATCH).Run();
}
