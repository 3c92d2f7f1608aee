// Large blocks of memory that XLA frees are kept and given to it again. Fresh pages cost more than what a program writes
// to them: a fifth of the CPU seconds of an update went into page faults.

#ifndef AREAL_JAX_NATIVE_BLOCKS_H_
#define AREAL_JAX_NATIVE_BLOCKS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__GLIBC__) && defined(__LP64__)
#include <link.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace areal_jax {

constexpr size_t kLargeBytes = 1 << 20;  // smaller blocks are left to the C library
constexpr size_t kAwaitedBytes = 1 << 28;  // one in use of so many is waited for before a fresh one is made
constexpr std::chrono::milliseconds kPatience{20};

// Blocks between their uses. Those in use and those kept together are never more than 5/4 of what was in use at once: a
// publication and an update need other blocks, and neither of them should find those of the other in its place.
class Blocks {
 public:
  // A kept block of at least `bytes`, and at most half as many more; nullptr where there is none.
  // The results of a program are ready a moment before its temporary memory is free: the next program waits for it.
  void* Take(size_t alignment, size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    void* memory = TakeKept(alignment, bytes);
    if (!memory && bytes >= kAwaitedBytes && IsInUse(bytes))
      kept_one_.wait_for(lock, kPatience, [&] { return (memory = TakeKept(alignment, bytes)) != nullptr; });
    return memory;
  }

  // Notes a fresh block. Returns what must be freed for the bound to hold.
  std::vector<void*> NoteFresh(void* memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Use(memory, bytes);
    most_bytes_ = std::max(most_bytes_, used_bytes_);
    return Shrink(most_bytes_ + most_bytes_ / 4);
  }

  // Keeps a block of `bytes` that is in use; false where it is not one that Take or NoteFresh saw.
  bool Keep(void* memory, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!Leave(memory)) return false;
    kept_.emplace(bytes, memory);
    kept_bytes_ += bytes;
    if (bytes >= kAwaitedBytes) kept_one_.notify_all();
    return true;
  }

  // Notes that the C library moved a block.
  void NoteMoved(void* from, void* to, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Leave(from) && bytes >= kLargeBytes) Use(to, bytes);
  }

  // What must be freed so that no block is kept; the bound is what is in use at once from now on.
  std::vector<void*> Clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_bytes_ = used_bytes_;
    return Shrink(used_bytes_);
  }

  // Whether blocks are kept at all.
  std::atomic<bool> keeps{false};

  // counts[3]: bytes kept, bytes in use, blocks given again.
  void Count(uint64_t* counts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts[0] = kept_bytes_, counts[1] = used_bytes_, counts[2] = taken_;
  }

 private:
  using BySize = std::multimap<size_t, void*>;

  static size_t MostFor(size_t bytes) { return bytes + bytes / 2; }

  void* TakeKept(size_t alignment, size_t bytes) {
    const auto end = kept_.upper_bound(MostFor(bytes));
    for (auto found = kept_.lower_bound(bytes); found != end; ++found) {
      const auto [size, memory] = *found;
      if (reinterpret_cast<uintptr_t>(memory) % alignment) continue;
      Forget(found);
      Use(memory, size);
      ++taken_;
      return memory;
    }
    return nullptr;
  }

  bool IsInUse(size_t bytes) const {
    return std::any_of(used_.begin(), used_.end(), [&](const auto& block) {
      return block.second >= bytes && block.second <= MostFor(bytes);
    });
  }

  void Use(void* memory, size_t bytes) {
    size_t& noted = used_[memory];
    used_bytes_ += bytes - noted;  // one that was freed elsewhere is noted still
    noted = bytes;
  }

  bool Leave(void* memory) {
    const auto found = used_.find(memory);
    if (found == used_.end()) return false;
    used_bytes_ -= found->second;
    used_.erase(found);
    return true;
  }

  void Forget(BySize::iterator block) {
    kept_bytes_ -= block->first;
    kept_.erase(block);
  }

  // The smallest block that is enough goes, so that a few bytes do not cost the memory of a whole program.
  std::vector<void*> Shrink(size_t most) {
    std::vector<void*> freed;
    while (!kept_.empty() && used_bytes_ + kept_bytes_ > most) {
      const auto enough = kept_.lower_bound(used_bytes_ + kept_bytes_ - most);
      const auto block = enough == kept_.end() ? std::prev(enough) : enough;
      freed.push_back(block->second);
      Forget(block);
    }
    return freed;
  }

  std::mutex mutex_;
  std::condition_variable kept_one_;
  BySize kept_;
  std::unordered_map<void*, size_t> used_;
  size_t used_bytes_ = 0, kept_bytes_ = 0, most_bytes_ = 0;
  uint64_t taken_ = 0;
};

inline Blocks& KeptBlocks() {
  static Blocks* blocks = new Blocks;  // XLA frees memory until the process ends
  return *blocks;
}

#if defined(__GLIBC__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

inline void FreeAll(const std::vector<void*>& blocks) {
  for (void* block : blocks) std::free(block);
}

// The functions that stand in the place of those of the C library. Each block comes from there, so that whoever frees it
// elsewhere may do so.
template <typename Fresh>
void* AllocateLarge(size_t alignment, size_t bytes, Fresh fresh) {
  if (void* kept = KeptBlocks().Take(alignment, bytes)) return kept;
  void* memory = fresh();
  if (!memory) {  // what is kept may be what is missing
    FreeAll(KeptBlocks().Clear());
    memory = fresh();
  }
  if (memory) FreeAll(KeptBlocks().NoteFresh(memory, malloc_usable_size(memory)));
  return memory;
}

inline int AllocateAligned(void** memory, size_t alignment, size_t bytes) {
  if (bytes < kLargeBytes || !KeptBlocks().keeps) return posix_memalign(memory, alignment, bytes);
  int failed = 0;
  void* large = AllocateLarge(alignment, bytes, [&] {
    void* fresh = nullptr;
    failed = posix_memalign(&fresh, alignment, bytes);
    return failed ? nullptr : fresh;
  });
  if (large) *memory = large;
  return large ? 0 : failed;
}

inline void* Allocate(size_t bytes) {
  if (bytes < kLargeBytes || !KeptBlocks().keeps) return std::malloc(bytes);
  return AllocateLarge(alignof(max_align_t), bytes, [&] { return std::malloc(bytes); });
}

inline void* Reallocate(void* memory, size_t bytes) {
  const bool is_large = memory && malloc_usable_size(memory) >= kLargeBytes;
  void* moved = std::realloc(memory, bytes);
  if (is_large && (moved || !bytes)) KeptBlocks().NoteMoved(memory, moved, moved ? malloc_usable_size(moved) : 0);
  return moved;
}

inline void Free(void* memory) {
  const size_t bytes = memory ? malloc_usable_size(memory) : 0;
  if (bytes < kLargeBytes || !KeptBlocks().Keep(memory, bytes)) std::free(memory);
}

#if defined(__x86_64__)
constexpr uint32_t kSlotTypes[] = {6, 7};  // R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT
#else
constexpr uint32_t kSlotTypes[] = {1025, 1026};  // R_AARCH64_GLOB_DAT, R_AARCH64_JUMP_SLOT
#endif

// Writes `function` into the slots through which an object calls `name`. Returns how many there were.
inline int Redirect(const dl_phdr_info& object, const char* name, void* function) {
  const ElfW(Dyn)* entries = nullptr;
  for (int i = 0; i < object.dlpi_phnum; ++i)
    if (object.dlpi_phdr[i].p_type == PT_DYNAMIC)
      entries = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
  std::map<int64_t, uintptr_t> values;
  for (; entries && entries->d_tag != DT_NULL; ++entries) values[entries->d_tag] = entries->d_un.d_val;
  const auto address = [&](int64_t tag) {  // the C library makes most of them absolute
    const uintptr_t value = values.count(tag) ? values[tag] : 0;
    return value && value < object.dlpi_addr ? value + object.dlpi_addr : value;
  };
  const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(address(DT_SYMTAB));
  const auto* names = reinterpret_cast<const char*>(address(DT_STRTAB));
  if (!symbols || !names) return 0;
  int found = 0;
  for (const auto& [table, size] : {std::pair{DT_JMPREL, DT_PLTRELSZ}, std::pair{DT_RELA, DT_RELASZ}}) {
    const auto* first = reinterpret_cast<const ElfW(Rela)*>(address(table));
    const size_t count = first ? values[size] / sizeof(ElfW(Rela)) : 0;
    for (const auto* r = first; r < first + count; ++r) {
      const uint32_t type = ELF64_R_TYPE(r->r_info);
      if (type != kSlotTypes[0] && type != kSlotTypes[1]) continue;
      if (std::strcmp(names + symbols[ELF64_R_SYM(r->r_info)].st_name, name)) continue;
      auto* slot = reinterpret_cast<void**>(object.dlpi_addr + r->r_offset);
      const uintptr_t page = sysconf(_SC_PAGESIZE), start = reinterpret_cast<uintptr_t>(slot) & -page;
      if (mprotect(reinterpret_cast<void*>(start), page, PROT_READ | PROT_WRITE)) continue;
      __atomic_store_n(slot, function, __ATOMIC_RELEASE);
      ++found;
    }
  }
  return found;
}

// Lets the loaded library whose file name contains `part` allocate through KeptBlocks. Whether it does so now.
inline bool KeepBlocksOf(const char* part) {
  struct Search {
    const char* part;
    bool done;
  } search{part, false};
  const auto visit = [](dl_phdr_info* object, size_t, void* data) {
    auto* wanted = static_cast<Search*>(data);
    if (!object->dlpi_name || !std::strstr(object->dlpi_name, wanted->part)) return 0;
    const std::pair<const char*, void*> functions[] = {
        {"posix_memalign", reinterpret_cast<void*>(&AllocateAligned)},
        {"malloc", reinterpret_cast<void*>(&Allocate)},
        {"realloc", reinterpret_cast<void*>(&Reallocate)},
        {"free", reinterpret_cast<void*>(&Free)},  // the last: blocks are kept only where they are asked for again
    };
    wanted->done = true;
    for (const auto& [name, function] : functions) wanted->done = wanted->done && Redirect(*object, name, function);
    KeptBlocks().keeps = wanted->done;
    return 1;
  };
  dl_iterate_phdr(visit, &search);
  return search.done;
}

#else

inline void FreeAll(const std::vector<void*>&) {}
inline int AllocateAligned(void** memory, size_t alignment, size_t bytes) {
  return posix_memalign(memory, alignment, bytes);
}
inline void Free(void* memory) { std::free(memory); }
inline bool KeepBlocksOf(const char*) { return false; }

#endif

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_BLOCKS_H_
