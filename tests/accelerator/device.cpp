// A pretended accelerator: a torch device of kind PrivateUse1 whose memory lies apart and whose operations run on the
// CPU's kernels. What a real one punishes by wrong numbers or errors is punished here, too: fresh memory is full of
// NaN, tensors of two devices don't mix, and where it is lazy nothing is there before somebody has waited for it.
//
// Kernels run at once, for of what a late one does only two things can be seen: that its inputs changed before it ran,
// and that its outputs weren't there yet. The first takes a host or a stream that writes without waiting. The host
// writes to a device by copies alone, and those from pinned memory do happen as late as waits allow. The second is what
// `hide` does: what a kernel has written turns to NaN until work comes behind it, in its own stream or after a wait.
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
using Index = c10::DeviceIndex;
using Lock = std::lock_guard<std::mutex>;

// Nothing that is called while one of these is held may want another, or Python's lock.
std::mutex of_memory, of_pinned, of_queues;

struct Switches {
  std::atomic<bool> no_double{false}, is_lazy{false}, is_gone{false};
  std::atomic<int64_t> limit{std::numeric_limits<int64_t>::max()};
  std::set<std::string> lacks;  // turned while nothing runs
} switches;

void present() {
  TORCH_CHECK(!switches.is_gone, "sim error: the device was lost");
}

// Memory.

int64_t used[DEVICES], peak[DEVICES];
thread_local Index current = 0;

thread_local c10::StreamId streams[DEVICES];  // in which this thread's work is queued

struct Block {
  void* start;
  size_t bytes;
  Index device;
  std::set<c10::StreamId> known;  // streams whose work is done before this memory is handed out again
};

void release(void* context) {
  Lock lock(of_memory);
  auto* block = static_cast<Block*>(context);
  used[block->device] -= static_cast<int64_t>(block->bytes);
  std::free(block->start);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(of_memory);
    present();
    const int64_t wanted = used[current] + static_cast<int64_t>(bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, wanted <= switches.limit, "sim out of memory. Tried to allocate ", bytes,
                     " bytes; ", used[current], " of ", switches.limit.load(), " are in use.");
    void* start = nullptr;
    if (bytes && posix_memalign(&start, 64, bytes)) throw std::bad_alloc();
    if (bytes) std::memset(start, 0xFF, bytes);  // NaN in every floating dtype
    used[current] = wanted;
    peak[current] = std::max(peak[current], wanted);
    return {start, new Block{start, bytes, current, {streams[current]}}, &release, c10::Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    Lock lock(of_memory);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* of : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      (*of)[0].current = used[device];
      (*of)[0].peak = peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(Index) override {}
  void resetPeakStats(Index device) override { peak[device] = used[device]; }
  std::pair<size_t, size_t> getMemoryInfo(Index device) override {
    const size_t all = std::min<int64_t>(switches.limit.load(), int64_t(1) << 40);
    return {all - static_cast<size_t>(used[device]), all};
  }
};
Memory memory;

// Pinned memory of the host.

std::map<const char*, size_t> pinned;

void release_pinned(void* start) {
  Lock lock(of_pinned);
  pinned.erase(static_cast<const char*>(start));
  std::free(start);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Lock lock(of_pinned);
    void* start = nullptr;
    if (bytes && posix_memalign(&start, 64, bytes)) throw std::bad_alloc();
    if (bytes) pinned[static_cast<const char*>(start)] = bytes;
    return {start, start, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  Lock lock(of_pinned);
  const auto* at = static_cast<const char*>(data);
  auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

// Streams: queues of what nobody has waited for.

struct Work {
  int64_t number;
  std::function<void()> run;
};
std::map<std::pair<Index, c10::StreamId>, std::deque<Work>> queues;
int64_t numbered = 0;
std::atomic<c10::StreamId> newest{0};

using Key = std::pair<Index, c10::StreamId>;

Key key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

std::recursive_mutex of_running;  // what one thread has taken out of a queue must be done before another looks into it

void drain(const Key& key, int64_t last = std::numeric_limits<int64_t>::max()) {
  std::lock_guard<std::recursive_mutex> running(of_running);
  while (true) {
    Work work;
    {
      Lock lock(of_queues);
      auto& queue = queues[key];
      if (queue.empty() || queue.front().number > last) return;
      work = std::move(queue.front());
      queue.pop_front();
    }
    work.run();
  }
}

void enqueue(const Key& key, std::function<void()> run) {
  Lock lock(of_queues);
  queues[key].push_back({++numbered, std::move(run)});
}

bool is_done(const Key& key, int64_t last = std::numeric_limits<int64_t>::max()) {
  Lock lock(of_queues);
  return queues[key].empty() || queues[key].front().number > last;
}

void drain_current() {  // an operation comes after all that was queued in its own stream, not in another
  for (Index device = 0; device < DEVICES; device++) drain({device, streams[device]});
}

struct Event {
  Key key;
  int64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before(KIND, current);
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < DEVICES, "sim error: invalid device ordinal ", int(device.index()));
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < DEVICES) current = device.index();
  }
  c10::Stream stream_of(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device.has_index() ? device.index() : current), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, streams[device.has_index() ? device.index() : current]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream_of(device, ++newest);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  Index deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream& stream, const Index, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    Lock lock(of_queues);
    *event = new Event{key_of(stream), numbered};
  }
  // A stream that waits for another's event: at the latest moment this is done when something runs in it, and then at once.
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto of = *static_cast<Event*>(event);
    enqueue(key_of(stream), [of] { drain(of.key, of.number); });
  }
  bool queryEvent(void* event) const override {
    return !event || is_done(static_cast<Event*>(event)->key, static_cast<Event*>(event)->number);
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) drain(static_cast<Event*>(event)->key, static_cast<Event*>(event)->number);
  }
  bool queryStream(const c10::Stream& stream) const override { return is_done(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    present();
    drain(key_of(stream));
  }
  void synchronizeDevice(const Index device) const override {
    present();
    std::vector<Key> keys;
    {
      Lock lock(of_queues);
      for (auto& queue : queues)
        if (queue.first.first == device) keys.push_back(queue.first);
    }
    for (auto& key : keys) drain(key);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const Guard guard;

// Tensors.

void require_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(!switches.no_double || (dtype != c10::kDouble && dtype != c10::kComplexDouble),
                   "Cannot convert a sim Tensor to float64 dtype as this device doesn't support float64.");
}

struct On {  // allocations of this block are of one device
  explicit On(std::optional<c10::Device> device) : before(guard.getDevice()) {
    if (device) guard.setDevice(*device);
  }
  ~On() { guard.uncheckedSetDevice(before); }
  c10::Device before;
};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  require_dtype(c10::dtype_or_default(dtype));
  On on(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  require_dtype(c10::dtype_or_default(dtype));
  On on(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor seen_by_host(const at::Tensor& tensor) {  // the same memory as a tensor of the CPU, for kernels
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const auto storage = tensor.storage();
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  auto flat = at::from_blob(storage.mutable_data(), {count}, [storage](void*) {}, tensor.options().device(c10::kCPU));
  return at::native::as_strided_tensorimpl(flat, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

// What is done with it in the stream at hand. A real device would hand out such memory again while it is still read.
void use(const at::Tensor& tensor) {
  const auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  Lock lock(of_memory);
  TORCH_CHECK(!switches.is_lazy || block->known.count(streams[block->device]),
              "sim error: memory of one stream is used in another that `record_stream` hasn't told it of");
}

// Let nobody see what was just written before work comes behind it.
void hide(const at::Tensor& written, std::set<const void*>& hidden) {
  if (!switches.is_lazy || !written.defined() || !written.is_privateuseone()) return;
  const auto storage = written.storage();
  auto* start = static_cast<char*>(storage.mutable_data());
  if (!start || !hidden.insert(start).second) return;
  auto kept = std::make_shared<std::vector<char>>(start, start + storage.nbytes());
  std::memset(start, 0xFF, kept->size());
  enqueue({written.device().index(), streams[written.device().index()]}, [storage, kept] {
    std::memcpy(storage.mutable_data(), kept->data(), std::min(kept->size(), storage.nbytes()));
  });
}

void hide(const at::Tensor& written) {
  std::set<const void*> hidden;
  hide(written, hidden);
}

at::Tensor on_device(const at::Tensor& host, Index device) {
  if (!host.defined() || !host.is_cpu()) return host;
  auto made = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, c10::Device(KIND, device), {});
  if (host.numel()) seen_by_host(made).copy_(host);
  return made;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  present();
  const bool from_device = source.is_privateuseone(), to_device = target.is_privateuseone();
  if (!target.numel()) return target;
  if (from_device) use(source);
  if (to_device) use(target);
  // Other tensors of the same memory, which Python knows nothing of.
  const auto from = seen_by_host(from_device ? source : source.detach());
  const auto to = seen_by_host(to_device ? target : target.detach());
  auto copy = [from, to] { to.copy_(from.expand_as(to)); };
  const bool is_apart = from_device != to_device && is_pinned(from_device ? target.data_ptr() : source.data_ptr());
  if (switches.is_lazy && non_blocking && is_apart) {
    // The CPU's own tensor is kept as it is until then: whoever changes it without a wait sends what it became.
    if (from_device) std::memset(target.data_ptr(), 0xFF, target.nbytes());
    const Index device = (from_device ? source : target).device().index();
    enqueue({device, streams[device]}, copy);
    return target;
  }
  drain_current();
  copy();
  if (to_device && (from_device || non_blocking)) hide(target);
  return target;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar read(const at::Tensor& tensor) {
  present();
  use(tensor);
  drain_current();
  return seen_by_host(tensor).item();
}

at::Tensor as_strided(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

void grow(const c10::Storage& storage, size_t bytes) {
  On on(storage.device());
  auto* impl = storage.unsafeGetStorageImpl();
  auto fresh = memory.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept) std::memcpy(fresh.get(), storage.data(), kept);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

const at::Tensor& resize_(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  drain_current();
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = static_cast<size_t>(tensor.numel() + tensor.storage_offset()) * tensor.element_size();
  if (tensor.storage().nbytes() < bytes) grow(tensor.storage(), bytes);
  return tensor;
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(x.device() == weight.device(), "convolution: expected all tensors to be on the same device");
  for (const at::Tensor& given : {x, weight}) use(given);
  drain_current();
  std::optional<at::Tensor> shift;
  if (bias && bias->defined()) shift = seen_by_host(*bias);
  auto made = at::convolution(seen_by_host(x), seen_by_host(weight), shift, stride, padding, dilation, transposed,
                              output_padding, groups);
  auto brought = on_device(made, x.device().index());
  hide(brought);
  return brought;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  drain_current();
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_x, of_weight, of_bias] = at::convolution_backward(
      seen_by_host(gradient), seen_by_host(x), seen_by_host(weight), c10::OptionalIntArrayRef({outputs}), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  const auto device = x.device().index();
  auto made = std::make_tuple(on_device(of_x, device), on_device(of_weight, device), on_device(of_bias, device));
  std::apply([](const auto&... each) { (hide(each), ...); }, made);
  return made;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  Lock lock(of_memory);
  static_cast<Block*>(tensor.storage().data_ptr().get_context())->known.insert(stream.id());
}

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return 0;  // by products and softmax, as on every device without a kernel for it
}

// Every other operation: its tensors' memory is handed to the CPU's kernel, and what that makes is brought here.

struct Call {
  const c10::OperatorHandle& op;
  std::optional<Index> device;
  bool has_host = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // tensors of this device, and what the kernel is handed

  at::Tensor handed(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) {
      if (tensor.defined() && tensor.dim() > 0 && tensor.is_cpu()) has_host = true;
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device().index(), op.schema().name(),
                ": expected all tensors to be on the same device, found two of sim");
    device = tensor.device().index();
    use(tensor);
    for (auto& [ours, host] : pairs)
      if (ours.is_same(tensor)) return host;
    // An output that a kernel is to give its size needs memory of the host that can grow.
    auto host = tensor.numel() ? seen_by_host(tensor) : at::empty(tensor.sizes(), tensor.options().device(c10::kCPU));
    pairs.emplace_back(tensor, host);
    return pairs.back().second;
  }

  at::Tensor brought(const at::Tensor& tensor) {
    for (auto& [ours, host] : pairs)
      if (host.is_same(tensor)) return ours;
    return device ? on_device(tensor, *device) : tensor;
  }

  void write_back() {  // kernels may have given an output another size
    for (auto& [ours, host] : pairs) {
      if (host.sizes() == ours.sizes() && host.strides() == ours.strides()) continue;
      ours.resize_(host.sizes());
      if (host.numel()) seen_by_host(ours).copy_(host);
    }
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  present();
  drain_current();
  Call call{op};
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(!switches.lacks.count(schema.name().substr(schema.name().find("::") + 2)), "The operator '",
                              schema.name(), "' is not currently implemented for the sim device.");
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  std::vector<at::Tensor> written;
  const bool may_mix = schema.name().find("index") != std::string::npos;  // by indices of the host
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    TORCH_CHECK(!alias || alias->isWrite() || schema.returns().empty() || !schema.returns()[0].alias_info(),
                schema.name(), ": a view that the pretended device doesn't know");
    const bool is_written = alias && alias->isWrite();
    if (value.isTensor()) {
      if (is_written) written.push_back(value.toTensor());
      value = call.handed(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (is_written) written.push_back(tensor);
        list.push_back(call.handed(tensor));
      }
      value = c10::List<at::Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(call.handed(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      call.device = value.toDevice().has_index() ? value.toDevice().index() : current;
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      TORCH_CHECK(false, schema.name(), ": expected a 'sim' device type for generator but found 'cpu'");
    }
  }
  TORCH_CHECK(may_mix || !(call.device && call.has_host && !call.pairs.empty()), schema.name(),
              ": expected all tensors to be on the same device, found cpu and sim");
  op.callBoxed(stack);
  call.write_back();
  const size_t made = schema.returns().size();
  for (size_t i = stack->size() - made; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.brought(value.toTensor());
      written.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.brought(tensor));
      written.insert(written.end(), list.begin(), list.end());
      value = c10::List<at::Tensor>(list);
    }
  }
  std::set<const void*> hidden;
  for (const auto& tensor : written) hide(tensor, hidden);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return !switches.is_gone; }
  bool hasPrimaryContext(Index) const override { return true; }
  Index deviceCount() const override { return DEVICES; }
  Index getCurrentDevice() const override { return current; }
  void setCurrentDevice(Index device) const override { guard.setDevice({KIND, device}); }
  Index exchangeDevice(Index device) const override { return guard.exchangeDevice({KIND, device}).index(); }
  Index maybeExchangeDevice(Index device) const override { return device < 0 ? current : exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  const at::Generator& getDefaultGenerator(Index) const override {
    static const at::Generator generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(Index) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { grow(storage, bytes); }
};

// What tests turn and read.

void turn(bool no_double, bool is_lazy, bool is_gone, int64_t limit, const std::string& lacks) {
  std::istringstream names(lacks);
  switches.lacks = {std::istream_iterator<std::string>(names), std::istream_iterator<std::string>()};
  switches.no_double = no_double;
  switches.is_lazy = is_lazy;
  switches.is_gone = is_gone;
  switches.limit = limit < 0 ? std::numeric_limits<int64_t>::max() : limit;
}

TORCH_LIBRARY(driftlens_sim, m) {
  m.def("turn(bool no_double, bool is_lazy, bool is_gone, int limit, str lacks) -> ()", &turn);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Kernels of the CPU in whose place torch would put several operations, which round in another way.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", read);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", plain_attention);
  m.impl("record_stream", record_stream);
}

const bool registered = [] {
  static Hooks hooks;
  c10::SetAllocator(KIND, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
