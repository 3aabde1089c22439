// Programs: what gbmoe/programs/ has recorded of a kind of call, run without Python between its statements.
//
// Tensors of a program have numbers, its inputs the first ones. Python writes a program down as integers (gbmoe/programs/encoding.py) and
// files it under a table, which stands for all that a call depends on but its tensors, and the kinds of its input tensors. A call is two
// operators. find_program takes the tensors and looks for their kinds; Python then drops its references to them, so that run_program can
// free each one after the last statement that reads it.
//
// An allocation or an operator of torch that fails ends run_program, because the stable ABI does not tell torch's exceptions apart. Python
// does that statement itself, which raises the exception that a caller expects, or else resume_program goes on with what it returned.
//
// This file needs no CUDA and works on tensors of any device.

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "operators.h"

namespace gbmoe {
namespace {

namespace stable = torch::stable::detail;
using Integers = std::vector<int64_t>;

// ------------------------------------------------------------------------------------------------------------------ tensors

// A reference to a tensor of torch.
class Handle {
 public:
  Handle() = default;
  explicit Handle(AtenTensorHandle owned) : owned_(owned) {}
  Handle(Handle&& other) noexcept : owned_(std::exchange(other.owned_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(owned_, other.owned_);
    other.reset();
    return *this;
  }
  ~Handle() { reset(); }

  AtenTensorHandle get() const { return owned_; }
  // Another reference, for a callee that takes it over.
  AtenTensorHandle copy() const {
    if (!owned_) throw std::runtime_error("gbmoe: a program reads a tensor that is not there");
    AtenTensorHandle other;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(owned_, &other));
    return other;
  }
  void reset() {
    if (owned_) aoti_torch_delete_tensor_object(std::exchange(owned_, nullptr));
  }

 private:
  AtenTensorHandle owned_ = nullptr;
};
using Handles = std::vector<Handle>;

Handles handles_of(StableIValue list) {
  const auto owned = stable::to<StableListHandle>(list);
  size_t size = 0;
  TORCH_ERROR_CODE_CHECK(torch_list_size(owned, &size));
  Handles handles(size);
  for (size_t i = 0; i < size; i++) {
    StableIValue element;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(owned, i, &element));
    handles[i] = Handle(stable::to<AtenTensorHandle>(element));
  }
  TORCH_ERROR_CODE_CHECK(torch_delete_list(owned));
  return handles;
}

// Another reference to each of `tensors` whose number is in `numbers`.
StableIValue list_of(const Handles& tensors, const Integers& numbers) {
  StableListHandle list;
  TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(numbers.size(), &list));
  for (const int64_t number : numbers)
    TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, stable::from(tensors.at(number).copy())));
  return stable::from(list);
}

// What a kind of tensor is written down as: dtype, type and index of the device, the address modulo 16, the number of dimensions, sizes,
// strides. False for one without memory.
bool append_kind(AtenTensorHandle tensor, Integers& kinds, void** address) {
  int32_t dtype, device_type, device_index, layout;
  int64_t dims;
  int64_t *sizes, *strides;
  if (aoti_torch_get_layout(tensor, &layout) || layout != aoti_torch_layout_strided() || aoti_torch_get_dtype(tensor, &dtype) ||
      aoti_torch_get_device_type(tensor, &device_type) || aoti_torch_get_device_index(tensor, &device_index) ||
      aoti_torch_get_dim(tensor, &dims) || aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides) ||
      aoti_torch_get_data_ptr(tensor, address))
    return false;
  kinds.insert(
      kinds.end(), {dtype, device_type, device_index, static_cast<int64_t>(reinterpret_cast<uintptr_t>(*address) & 15), dims});
  kinds.insert(kinds.end(), sizes, sizes + dims);
  kinds.insert(kinds.end(), strides, strides + dims);
  return true;
}

// ----------------------------------------------------------------------------------------------------------------- programs

class Reader {
 public:
  explicit Reader(const Integers& code) : at_(code.data()), end_(code.data() + code.size()) {}
  bool ended() const { return at_ == end_; }
  int64_t next() {
    if (ended()) throw std::runtime_error("gbmoe: the code of a program ends early");
    return *at_++;
  }
  Integers list() {
    Integers numbers(next());
    for (auto& number : numbers) number = next();
    return numbers;
  }

 private:
  const int64_t *at_, *end_;
};

// As append_kind writes it; the address does not count.
struct Kind {
  int32_t dtype, device_type, device_index;
  Integers sizes, strides;

  static Kind read(Reader& code) {
    Kind kind;
    kind.dtype = static_cast<int32_t>(code.next());
    kind.device_type = static_cast<int32_t>(code.next());
    kind.device_index = static_cast<int32_t>(code.next());
    code.next();
    kind.sizes.resize(code.next());
    kind.strides.resize(kind.sizes.size());
    for (auto& size : kind.sizes) size = code.next();
    for (auto& stride : kind.strides) stride = code.next();
    return kind;
  }
};

struct Argument {
  // In the order of encoding.py.
  enum Type { kNone, kTensor, kInteger, kBool, kReal, kDtype, kMemoryFormat, kIntegers, kReals };
  Type type;
  bool optional;  // in the schema, so that what is given lies on the heap
  int64_t number;
  double real;
  Integers integers;
  std::vector<double> reals;

  static Argument read(Reader& code, const std::vector<double>& reals) {
    Argument argument{};
    argument.type = static_cast<Type>(code.next());
    argument.optional = code.next();
    if (argument.type == kIntegers || argument.type == kReals) {
      argument.integers = code.list();
    } else if (argument.type != kNone) {
      argument.number = code.next();
    }
    if (argument.type == kReal) argument.real = reals.at(argument.number);
    if (argument.type == kReals)
      for (const int64_t number : argument.integers) argument.reals.push_back(reals.at(number));
    return argument;
  }

  StableIValue value(const Handles& tensors) const {
    if (type == kNone) return stable::from(nullptr);
    const StableIValue value = plain(tensors);
    return optional ? stable::from(new StableIValue(value)) : value;
  }

 private:
  StableIValue plain(const Handles& tensors) const {
    switch (type) {
      case kTensor: return stable::from(tensors.at(number).copy());
      case kInteger: return stable::from(number);
      case kBool: return stable::from(number != 0);
      case kReal: return stable::from(real);
      case kDtype: return stable::from(static_cast<int32_t>(number));
      case kMemoryFormat:
        return stable::from(number ? aoti_torch_memory_format_preserve_format() : aoti_torch_memory_format_contiguous_format());
      case kIntegers: return stable::from(integers);
      default: return stable::from(reals);
    }
  }
};

std::unordered_map<std::string, BoxedOperator>& own_operators() {
  static std::unordered_map<std::string, BoxedOperator> by_name;
  return by_name;
}

struct Statement {
  // In the order of encoding.py: memory, memory of zeros, a view, another name for a tensor, a call.
  enum Type { kEmpty, kZeros, kView, kRename, kCall };
  Type type;
  Integers results;  // numbers of tensors; -1 for one that nobody reads
  Integers reads;
  Integers freed;
  Kind kind;
  int64_t offset;
  BoxedOperator own;  // of gbmoe_cuda; otherwise name and overload are an operator of torch
  std::string name, overload;
  std::vector<Argument> arguments;

  static Statement read(Reader& code, const std::vector<std::string>& names, const std::vector<double>& reals) {
    Statement statement{};
    statement.type = static_cast<Type>(code.next());
    statement.results = code.list();
    statement.reads = code.list();
    statement.freed = code.list();
    if (statement.type == kCall) {
      statement.name = names.at(code.next());
      statement.overload = names.at(code.next());
      static const std::string kOwn = "gbmoe_cuda::";
      if (statement.name.compare(0, kOwn.size(), kOwn) == 0) {
        const auto found = own_operators().find(statement.name.substr(kOwn.size()));
        if (found == own_operators().end()) throw std::runtime_error("gbmoe: programs cannot call " + statement.name);
        statement.own = found->second;
      }
      for (int64_t left = code.next(); left > 0; left--) statement.arguments.push_back(Argument::read(code, reals));
    } else if (statement.type != kRename) {
      statement.offset = code.next();
      statement.kind = Kind::read(code);
    }
    return statement;
  }

  // False where torch has refused it.
  bool perform(Handles& tensors) const {
    if (type == kRename) {
      tensors[results[0]] = Handle(tensors[reads[0]].copy());
      return true;
    }
    if (type == kCall) return call(tensors);
    AtenTensorHandle made;
    const auto dims = static_cast<int64_t>(kind.sizes.size());
    if (type == kView) {
      TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
          tensors.at(reads[0]).get(), dims, kind.sizes.data(), kind.strides.data(), offset, &made));
    } else if (
        aoti_torch_empty_strided(
            dims, kind.sizes.data(), kind.strides.data(), kind.dtype, kind.device_type, kind.device_index, &made)) {
      return false;
    }
    Handle result(made);
    if (type == kZeros) {
      StableIValue stack[1] = {stable::from(result.copy())};
      if (torch_call_dispatcher("aten::zero_", "", stack, TORCH_ABI_VERSION)) return false;
      Handle same(stable::to<AtenTensorHandle>(stack[0]));
    }
    tensors[results[0]] = std::move(result);
    return true;
  }

 private:
  bool call(Handles& tensors) const {
    constexpr size_t kMost = 40;
    StableIValue stack[kMost];
    if (std::max(arguments.size(), results.size()) > kMost) throw std::runtime_error("gbmoe: too many arguments for a program");
    for (size_t i = 0; i < arguments.size(); i++) stack[i] = arguments[i].value(tensors);
    if (own) {
      own(stack, arguments.size(), results.size());
    } else if (torch_call_dispatcher(name.c_str(), overload.c_str(), stack, TORCH_ABI_VERSION)) {
      return false;
    }
    for (size_t i = 0; i < results.size(); i++) {
      Handle result(stable::to<AtenTensorHandle>(stack[i]));
      if (results[i] >= 0) tensors[results[i]] = std::move(result);
    }
    return true;
  }
};

struct Program {
  int64_t tensors;
  Integers freed_first, results;
  std::vector<Statement> statements;
};

struct HashOfIntegers {
  size_t operator()(const Integers& numbers) const {
    uint64_t hash = numbers.size();
    for (const int64_t number : numbers) hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return hash;
  }
};

using Table = std::unordered_map<Integers, int64_t, HashOfIntegers>;  // numbers of programs

std::shared_mutex mutex;
std::unordered_map<int64_t, Table> tables;
std::unordered_map<int64_t, std::shared_ptr<const Program>> programs;
int64_t last_number = 0;

// -------------------------------------------------------------------------------------------------------------------- calls

// A call: found and not yet run, or stopped at a statement.
struct Call {
  int64_t number;  // of the program
  std::shared_ptr<const Program> program;
  Handles tensors;
  size_t at = 0;
};

// Those of this thread, the newest one last. While one waits, Python may run another to its end, as a finaliser does.
thread_local std::vector<Call> waiting;
constexpr size_t kMostWaiting = 8;  // more have been left by exceptions

void wait(Call call) {
  if (waiting.size() == kMostWaiting) waiting.erase(waiting.begin());
  waiting.push_back(std::move(call));
}

// The newest call of a program, which then waits no longer.
Call take(int64_t number) {
  for (size_t i = waiting.size(); i-- > 0;) {
    if (waiting[i].number != number) continue;
    Call call = std::move(waiting[i]);
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    return call;
  }
  throw std::runtime_error("gbmoe: no call of this program waits");
}

// Runs on from the statement at which the call is, and returns the results.
StableIValue run_on(Call call) {
  for (; call.at < call.program->statements.size(); call.at++) {
    const Statement& statement = call.program->statements[call.at];
    if (!statement.perform(call.tensors)) {
      wait(std::move(call));
      throw std::runtime_error("gbmoe: a program has stopped");
    }
    for (const int64_t number : statement.freed) call.tensors[number].reset();
  }
  return list_of(call.tensors, call.program->results);
}

void find_program(StableIValue* stack, uint64_t, uint64_t) {
  const auto table = stable::to<int64_t>(stack[0]);
  Handles inputs = handles_of(stack[1]);
  stack[0] = stable::from(int64_t{-1});
  Integers kinds;
  kinds.reserve(16 * inputs.size());
  void* addresses[64];
  if (inputs.size() > 64) return;
  size_t known = 0;
  for (const Handle& input : inputs) {
    if (!append_kind(input.get(), kinds, &addresses[known])) return;
    // Tensors in the same memory may be one: a program is of tensors that are not.
    if (addresses[known] == nullptr) continue;
    if (std::find(addresses, addresses + known, addresses[known]) != addresses + known) return;
    known++;
  }
  const std::shared_lock<std::shared_mutex> lock(mutex);
  const auto of_table = tables.find(table);
  if (of_table == tables.end()) return;
  const auto found = of_table->second.find(kinds);
  if (found == of_table->second.end()) return;
  wait({found->second, programs.at(found->second), std::move(inputs), 0});
  stack[0] = stable::from(found->second);
}

void run_program(StableIValue* stack, uint64_t, uint64_t) {
  Call call = take(stable::to<int64_t>(stack[0]));
  call.tensors.resize(call.program->tensors);
  for (const int64_t number : call.program->freed_first) call.tensors[number].reset();
  stack[0] = run_on(std::move(call));
}

void stopped_program(StableIValue* stack, uint64_t, uint64_t) {
  const auto number = stable::to<int64_t>(stack[0]);
  stack[0] = stable::from(int64_t{-1});
  const Call* stopped = nullptr;
  for (const Call& call : waiting)
    if (call.number == number) stopped = &call;
  const bool known = stopped && stopped->at < stopped->program->statements.size();
  if (known) stack[0] = stable::from(static_cast<int64_t>(stopped->at));
  stack[1] = known ? list_of(stopped->tensors, stopped->program->statements[stopped->at].reads) : list_of({}, {});
}

void resume_program(StableIValue* stack, uint64_t, uint64_t) {
  Call call = take(stable::to<int64_t>(stack[0]));
  Handles results = handles_of(stack[1]);
  const Statement& statement = call.program->statements[call.at++];
  if (results.size() != statement.results.size()) throw std::runtime_error("gbmoe: other results than those of the statement");
  for (size_t i = 0; i < results.size(); i++)
    if (statement.results[i] >= 0) call.tensors[statement.results[i]] = std::move(results[i]);
  for (const int64_t number : statement.freed) call.tensors[number].reset();
  stack[0] = run_on(std::move(call));
}

}  // namespace

bool let_programs_call(const std::string& name, BoxedOperator boxed) {
  return own_operators().emplace(name, boxed).second || true;
}

std::vector<int64_t> kinds_of_tensors(const std::vector<Tensor>& tensors) {
  Integers kinds;
  void* address;
  for (const Tensor& tensor : tensors)
    if (!append_kind(tensor.get(), kinds, &address)) throw std::runtime_error("gbmoe: a tensor without memory has no kind");
  return kinds;
}

// The number of the new program, which takes the place of one that was filed under the same.
int64_t define_program(
    int64_t table, const std::vector<int64_t>& kinds, const std::vector<int64_t>& code, const std::vector<double>& reals,
    const std::string& names_by_line) {
  std::vector<std::string> names;
  for (size_t begin = 0, end; begin < names_by_line.size(); begin = end + 1) {
    end = std::min(names_by_line.find('\n', begin), names_by_line.size());
    names.push_back(names_by_line.substr(begin, end - begin));
  }
  auto program = std::make_shared<Program>();
  Reader reader(code);
  program->tensors = reader.next();
  program->freed_first = reader.list();
  program->results = reader.list();
  while (!reader.ended()) program->statements.push_back(Statement::read(reader, names, reals));
  const std::unique_lock<std::shared_mutex> lock(mutex);
  programs.emplace(++last_number, std::move(program));
  int64_t& filed = tables[table][kinds];
  programs.erase(filed);
  filed = last_number;
  return last_number;
}

void forget_programs(int64_t table) {
  const std::unique_lock<std::shared_mutex> lock(mutex);
  for (const auto& [kinds, number] : tables[table]) programs.erase(number);
  tables.erase(table);
}

void leave_program(int64_t number) {
  for (size_t i = waiting.size(); i-- > 0;) {
    if (waiting[i].number != number) continue;
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

GBMOE_OPERATOR_WITHOUT_TENSORS(define_program, "(int table, int[] kinds, int[] code, float[] reals, str names) -> int");
GBMOE_OPERATOR_WITHOUT_TENSORS(forget_programs, "(int table) -> ()");
GBMOE_OPERATOR_WITHOUT_TENSORS(leave_program, "(int program) -> ()");
GBMOE_OPERATOR_WITHOUT_TENSORS(kinds_of_tensors, "(Tensor[] tensors) -> int[]");
GBMOE_OPERATOR_BOXED(find_program, "(int table, Tensor[] tensors) -> int");
GBMOE_OPERATOR_BOXED(run_program, "(int program) -> Tensor[]");
GBMOE_OPERATOR_BOXED(stopped_program, "(int program) -> (int, Tensor[])");
GBMOE_OPERATOR_BOXED(resume_program, "(int program, Tensor[] results) -> Tensor[]");

}  // namespace gbmoe
