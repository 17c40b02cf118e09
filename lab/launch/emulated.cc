// A launch on a CPU for tests, with a thread of the system for each block.
#include <memory>
#include <vector>

#include "decode.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

template <typename T>
ffi::Error Emulate(ffi::RemainingArgs given, ffi::RemainingRets results, int32_t blocks) {
  std::vector<void*> pointers;
  for (size_t i = 0; i < given.size(); ++i) pointers.push_back(given.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < results.size(); ++i) pointers.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
  std::vector<std::thread> threads;
  for (int block = 0; block < blocks; ++block)
    threads.emplace_back([&, block] {
      const auto room = std::make_unique<launch::Room>();
      std::memset(room.get(), 0xff, sizeof *room);  // NaN
      std::copy(pointers.begin(), pointers.end(), room->pointers);
      room->numbers = *static_cast<const launch::Numbers*>(pointers[0]);
      launch::Decode<T>(*room, block, blocks, pointers.size() - sizeof(launch::Scratch<T>) / sizeof(void*)).Run();
    });
  for (std::thread& thread : threads) thread.join();
  return ffi::Error::Success();
}

#define LAUNCH ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int32_t>("blocks")
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_launch_float32, Emulate<float>, LAUNCH);
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_launch_bfloat16, Emulate<launch::Bfloat16>, LAUNCH);
