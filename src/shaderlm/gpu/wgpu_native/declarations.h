// The part of wgpu-native's C interface that shaderlm calls, copied from the header in the package wgpu 0.32.
// `python -m shaderlm.gpu.wgpu_native.generate` writes bindings.py from it; a test compares it with the whole header.

typedef uint64_t WGPUFlags;
typedef uint32_t WGPUBool;
typedef uint64_t WGPUSubmissionIndex;

typedef struct WGPUAdapterImpl* WGPUAdapter;
typedef struct WGPUBindGroupImpl* WGPUBindGroup;
typedef struct WGPUBindGroupLayoutImpl* WGPUBindGroupLayout;
typedef struct WGPUBufferImpl* WGPUBuffer;
typedef struct WGPUCommandBufferImpl* WGPUCommandBuffer;
typedef struct WGPUCommandEncoderImpl* WGPUCommandEncoder;
typedef struct WGPUComputePassEncoderImpl* WGPUComputePassEncoder;
typedef struct WGPUComputePipelineImpl* WGPUComputePipeline;
typedef struct WGPUDeviceImpl* WGPUDevice;
typedef struct WGPUInstanceImpl* WGPUInstance;
typedef struct WGPUPipelineLayoutImpl* WGPUPipelineLayout;
typedef struct WGPUQuerySetImpl* WGPUQuerySet;
typedef struct WGPUQueueImpl* WGPUQueue;
typedef struct WGPUShaderModuleImpl* WGPUShaderModule;

// Enumerations and flags: the members that are used.
typedef enum { WGPUStatus_Success = 1 } WGPUStatus;
typedef enum { WGPURequestDeviceStatus_Success = 1 } WGPURequestDeviceStatus;
typedef enum { WGPUMapAsyncStatus_Success = 1 } WGPUMapAsyncStatus;
typedef enum { WGPUCallbackMode_AllowProcessEvents = 2, WGPUCallbackMode_AllowSpontaneous = 3 } WGPUCallbackMode;
typedef enum { WGPUErrorType_OutOfMemory = 3 } WGPUErrorType;
typedef enum { WGPUDeviceLostReason_Destroyed = 2 } WGPUDeviceLostReason;
typedef enum { WGPUQueryType_Timestamp = 2 } WGPUQueryType;
typedef enum {
    WGPUAdapterType_DiscreteGPU = 1,
    WGPUAdapterType_IntegratedGPU = 2,
    WGPUAdapterType_CPU = 3
} WGPUAdapterType;
typedef enum {
    WGPUBackendType_WebGPU = 2,
    WGPUBackendType_D3D11 = 3,
    WGPUBackendType_D3D12 = 4,
    WGPUBackendType_Metal = 5,
    WGPUBackendType_Vulkan = 6,
    WGPUBackendType_OpenGL = 7,
    WGPUBackendType_OpenGLES = 8
} WGPUBackendType;
typedef enum {
    WGPUBufferBindingType_Uniform = 2,
    WGPUBufferBindingType_Storage = 3,
    WGPUBufferBindingType_ReadOnlyStorage = 4
} WGPUBufferBindingType;
typedef enum {
    WGPUFeatureName_TimestampQuery = 0x9,
    WGPUFeatureName_ShaderF16 = 0xB,
    WGPUNativeFeature_Subgroup = 0x30021,
    WGPUNativeFeature_TimestampQueryInsidePasses = 0x30025
} WGPUFeatureName;
typedef enum {
    WGPUSType_ShaderSourceWGSL = 0x2,
    WGPUSType_NativeLimits = 0x30002,
    WGPUSType_InstanceExtras = 0x30004
} WGPUSType;

typedef WGPUFlags WGPUBufferUsage;
typedef WGPUFlags WGPUMapMode;
typedef WGPUFlags WGPUShaderStage;
typedef WGPUFlags WGPUInstanceBackend;
typedef WGPUFlags WGPUInstanceFlag;
typedef WGPUFlags WGPUShaderRuntimeChecks;
#define WGPUBufferUsage_MapRead 0x1
#define WGPUBufferUsage_CopySrc 0x4
#define WGPUBufferUsage_CopyDst 0x8
#define WGPUBufferUsage_Uniform 0x40
#define WGPUBufferUsage_Storage 0x80
#define WGPUBufferUsage_QueryResolve 0x200
#define WGPUMapMode_Read 0x1
#define WGPUShaderStage_Compute 0x4
#define WGPUInstanceBackend_Vulkan 0x1
#define WGPUInstanceBackend_GL 0x2
#define WGPUInstanceBackend_Metal 0x4
#define WGPUInstanceBackend_DX12 0x8
#define WGPUInstanceFlag_Default 0x1000000
#define WGPUShaderRuntimeChecks_None 0x0

// Structures.
typedef struct { char const * data; size_t length; } WGPUStringView;
typedef struct WGPUChainedStruct { struct WGPUChainedStruct * next; WGPUSType sType; } WGPUChainedStruct;
typedef struct { uint64_t id; } WGPUFuture;

typedef void (*WGPUBufferMapCallback)(WGPUMapAsyncStatus, WGPUStringView, void*, void*);
typedef void (*WGPUDeviceLostCallback)(WGPUDevice const *, WGPUDeviceLostReason, WGPUStringView, void*, void*);
typedef void (*WGPURequestDeviceCallback)(WGPURequestDeviceStatus, WGPUDevice, WGPUStringView, void*, void*);
typedef void (*WGPUUncapturedErrorCallback)(WGPUDevice const *, WGPUErrorType, WGPUStringView, void*, void*);

typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUCallbackMode mode;
    WGPUBufferMapCallback callback;
    void* userdata1;
    void* userdata2;
} WGPUBufferMapCallbackInfo;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUCallbackMode mode;
    WGPURequestDeviceCallback callback;
    void* userdata1;
    void* userdata2;
} WGPURequestDeviceCallbackInfo;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUCallbackMode mode;
    WGPUDeviceLostCallback callback;
    void* userdata1;
    void* userdata2;
} WGPUDeviceLostCallbackInfo;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUUncapturedErrorCallback callback;
    void* userdata1;
    void* userdata2;
} WGPUUncapturedErrorCallbackInfo;

typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView vendor;
    WGPUStringView architecture;
    WGPUStringView device;
    WGPUStringView description;
    WGPUBackendType backendType;
    WGPUAdapterType adapterType;
    uint32_t vendorID;
    uint32_t deviceID;
    uint32_t subgroupMinSize;
    uint32_t subgroupMaxSize;
} WGPUAdapterInfo;
typedef struct {
    WGPUChainedStruct * nextInChain;
    uint32_t maxTextureDimension1D;
    uint32_t maxTextureDimension2D;
    uint32_t maxTextureDimension3D;
    uint32_t maxTextureArrayLayers;
    uint32_t maxBindGroups;
    uint32_t maxBindGroupsPlusVertexBuffers;
    uint32_t maxBindingsPerBindGroup;
    uint32_t maxDynamicUniformBuffersPerPipelineLayout;
    uint32_t maxDynamicStorageBuffersPerPipelineLayout;
    uint32_t maxSampledTexturesPerShaderStage;
    uint32_t maxSamplersPerShaderStage;
    uint32_t maxStorageBuffersPerShaderStage;
    uint32_t maxStorageTexturesPerShaderStage;
    uint32_t maxUniformBuffersPerShaderStage;
    uint64_t maxUniformBufferBindingSize;
    uint64_t maxStorageBufferBindingSize;
    uint32_t minUniformBufferOffsetAlignment;
    uint32_t minStorageBufferOffsetAlignment;
    uint32_t maxVertexBuffers;
    uint64_t maxBufferSize;
    uint32_t maxVertexAttributes;
    uint32_t maxVertexBufferArrayStride;
    uint32_t maxInterStageShaderVariables;
    uint32_t maxColorAttachments;
    uint32_t maxColorAttachmentBytesPerSample;
    uint32_t maxComputeWorkgroupStorageSize;
    uint32_t maxComputeInvocationsPerWorkgroup;
    uint32_t maxComputeWorkgroupSizeX;
    uint32_t maxComputeWorkgroupSizeY;
    uint32_t maxComputeWorkgroupSizeZ;
    uint32_t maxComputeWorkgroupsPerDimension;
    uint32_t maxImmediateSize;
} WGPULimits;
typedef struct {
    WGPUChainedStruct chain;
    uint32_t maxNonSamplerBindings;
    uint32_t maxBindingArrayElementsPerShaderStage;
    uint32_t maxBindingArraySamplerElementsPerShaderStage;
    uint32_t maxMultiviewViewCount;
} WGPUNativeLimits;

typedef struct {
    WGPUChainedStruct * nextInChain;
    size_t requiredFeatureCount;
    void const * requiredFeatures;
    void const * requiredLimits;
} WGPUInstanceDescriptor;
typedef struct { void * display; int screen; } WGPUXlibDisplayHandle;
typedef struct { uint32_t type; WGPUXlibDisplayHandle data; } WGPUNativeDisplayHandle;
typedef struct {
    WGPUChainedStruct chain;
    WGPUInstanceBackend backends;
    WGPUInstanceFlag flags;
    uint32_t dx12ShaderCompiler;
    uint32_t gles3MinorVersion;
    uint32_t glFenceBehaviour;
    WGPUStringView dxcPath;
    uint32_t dxcMaxShaderModel;
    uint32_t dx12PresentationSystem;
    uint8_t const * budgetForDeviceCreation;
    uint8_t const * budgetForDeviceLoss;
    WGPUNativeDisplayHandle displayHandle;
} WGPUInstanceExtras;
typedef struct { WGPUChainedStruct const * nextInChain; WGPUInstanceBackend backends; } WGPUInstanceEnumerateAdapterOptions;

typedef struct { WGPUChainedStruct * nextInChain; WGPUStringView label; } WGPUQueueDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    size_t requiredFeatureCount;
    WGPUFeatureName const * requiredFeatures;
    WGPULimits const * requiredLimits;
    WGPUQueueDescriptor defaultQueue;
    WGPUDeviceLostCallbackInfo deviceLostCallbackInfo;
    WGPUUncapturedErrorCallbackInfo uncapturedErrorCallbackInfo;
} WGPUDeviceDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    WGPUBufferUsage usage;
    uint64_t size;
    WGPUBool mappedAtCreation;
} WGPUBufferDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUBufferBindingType type;
    WGPUBool hasDynamicOffset;
    uint64_t minBindingSize;
} WGPUBufferBindingLayout;
typedef struct { WGPUChainedStruct * nextInChain; uint32_t type; } WGPUSamplerBindingLayout;
typedef struct {
    WGPUChainedStruct * nextInChain;
    uint32_t sampleType;
    uint32_t viewDimension;
    WGPUBool multisampled;
} WGPUTextureBindingLayout;
typedef struct {
    WGPUChainedStruct * nextInChain;
    uint32_t access;
    uint32_t format;
    uint32_t viewDimension;
} WGPUStorageTextureBindingLayout;
typedef struct {
    WGPUChainedStruct * nextInChain;
    uint32_t binding;
    WGPUShaderStage visibility;
    uint32_t bindingArraySize;
    WGPUBufferBindingLayout buffer;
    WGPUSamplerBindingLayout sampler;
    WGPUTextureBindingLayout texture;
    WGPUStorageTextureBindingLayout storageTexture;
} WGPUBindGroupLayoutEntry;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    size_t entryCount;
    WGPUBindGroupLayoutEntry const * entries;
} WGPUBindGroupLayoutDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    uint32_t binding;
    WGPUBuffer buffer;
    uint64_t offset;
    uint64_t size;
    void * sampler;
    void * textureView;
} WGPUBindGroupEntry;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    WGPUBindGroupLayout layout;
    size_t entryCount;
    WGPUBindGroupEntry const * entries;
} WGPUBindGroupDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    size_t bindGroupLayoutCount;
    WGPUBindGroupLayout const * bindGroupLayouts;
    uint32_t immediateSize;
} WGPUPipelineLayoutDescriptor;
typedef struct { WGPUChainedStruct chain; WGPUStringView code; } WGPUShaderSourceWGSL;
typedef struct { WGPUChainedStruct * nextInChain; WGPUStringView label; } WGPUShaderModuleDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUShaderModule module;
    WGPUStringView entryPoint;
    size_t constantCount;
    void const * constants;
} WGPUComputeState;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    WGPUPipelineLayout layout;
    WGPUComputeState compute;
} WGPUComputePipelineDescriptor;
typedef struct { WGPUChainedStruct * nextInChain; WGPUStringView label; } WGPUCommandEncoderDescriptor;
typedef struct { WGPUChainedStruct * nextInChain; WGPUStringView label; } WGPUCommandBufferDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUQuerySet querySet;
    uint32_t beginningOfPassWriteIndex;
    uint32_t endOfPassWriteIndex;
} WGPUPassTimestampWrites;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    WGPUPassTimestampWrites const * timestampWrites;
} WGPUComputePassDescriptor;
typedef struct {
    WGPUChainedStruct * nextInChain;
    WGPUStringView label;
    WGPUQueryType type;
    uint32_t count;
} WGPUQuerySetDescriptor;

// Functions.
WGPUInstance wgpuCreateInstance(WGPUInstanceDescriptor const *);
void wgpuInstanceProcessEvents(WGPUInstance);
size_t wgpuInstanceEnumerateAdapters(WGPUInstance, WGPUInstanceEnumerateAdapterOptions const *, WGPUAdapter *);
WGPUStatus wgpuAdapterGetInfo(WGPUAdapter, WGPUAdapterInfo *);
void wgpuAdapterInfoFreeMembers(WGPUAdapterInfo);
WGPUStatus wgpuAdapterGetLimits(WGPUAdapter, WGPULimits *);
WGPUBool wgpuAdapterHasFeature(WGPUAdapter, WGPUFeatureName);
WGPUFuture wgpuAdapterRequestDevice(WGPUAdapter, WGPUDeviceDescriptor const *, WGPURequestDeviceCallbackInfo);
void wgpuAdapterRelease(WGPUAdapter);

WGPUQueue wgpuDeviceGetQueue(WGPUDevice);
WGPUStatus wgpuDeviceGetLimits(WGPUDevice, WGPULimits *);
WGPUBool wgpuDeviceHasFeature(WGPUDevice, WGPUFeatureName);
WGPUBool wgpuDevicePoll(WGPUDevice, WGPUBool wait, WGPUSubmissionIndex const *);
void wgpuDeviceDestroy(WGPUDevice);
void wgpuDeviceRelease(WGPUDevice);
WGPUBuffer wgpuDeviceCreateBuffer(WGPUDevice, WGPUBufferDescriptor const *);
WGPUBindGroup wgpuDeviceCreateBindGroup(WGPUDevice, WGPUBindGroupDescriptor const *);
WGPUBindGroupLayout wgpuDeviceCreateBindGroupLayout(WGPUDevice, WGPUBindGroupLayoutDescriptor const *);
WGPUPipelineLayout wgpuDeviceCreatePipelineLayout(WGPUDevice, WGPUPipelineLayoutDescriptor const *);
WGPUShaderModule wgpuDeviceCreateShaderModule(WGPUDevice, WGPUShaderModuleDescriptor const *);
WGPUShaderModule wgpuDeviceCreateShaderModuleTrusted(
    WGPUDevice, WGPUShaderModuleDescriptor const *, WGPUShaderRuntimeChecks);
WGPUComputePipeline wgpuDeviceCreateComputePipeline(WGPUDevice, WGPUComputePipelineDescriptor const *);
WGPUCommandEncoder wgpuDeviceCreateCommandEncoder(WGPUDevice, WGPUCommandEncoderDescriptor const *);
WGPUQuerySet wgpuDeviceCreateQuerySet(WGPUDevice, WGPUQuerySetDescriptor const *);

WGPUSubmissionIndex wgpuQueueSubmitForIndex(WGPUQueue, size_t, WGPUCommandBuffer const *);
void wgpuQueueWriteBuffer(WGPUQueue, WGPUBuffer, uint64_t offset, void const *, size_t);
float wgpuQueueGetTimestampPeriod(WGPUQueue);
void wgpuQueueRelease(WGPUQueue);

WGPUFuture wgpuBufferMapAsync(WGPUBuffer, WGPUMapMode, size_t offset, size_t size, WGPUBufferMapCallbackInfo);
void const * wgpuBufferGetConstMappedRange(WGPUBuffer, size_t offset, size_t size);
void wgpuBufferUnmap(WGPUBuffer);
void wgpuBufferDestroy(WGPUBuffer);
void wgpuBufferRelease(WGPUBuffer);

WGPUComputePassEncoder wgpuCommandEncoderBeginComputePass(WGPUCommandEncoder, WGPUComputePassDescriptor const *);
void wgpuCommandEncoderCopyBufferToBuffer(
    WGPUCommandEncoder, WGPUBuffer source, uint64_t, WGPUBuffer target, uint64_t, uint64_t size);
void wgpuCommandEncoderResolveQuerySet(
    WGPUCommandEncoder, WGPUQuerySet, uint32_t first, uint32_t count, WGPUBuffer, uint64_t offset);
WGPUCommandBuffer wgpuCommandEncoderFinish(WGPUCommandEncoder, WGPUCommandBufferDescriptor const *);
void wgpuCommandEncoderRelease(WGPUCommandEncoder);
void wgpuComputePassEncoderSetPipeline(WGPUComputePassEncoder, WGPUComputePipeline);
void wgpuComputePassEncoderSetBindGroup(WGPUComputePassEncoder, uint32_t, WGPUBindGroup, size_t, uint32_t const *);
void wgpuComputePassEncoderDispatchWorkgroups(WGPUComputePassEncoder, uint32_t x, uint32_t y, uint32_t z);
void wgpuComputePassEncoderWriteTimestamp(WGPUComputePassEncoder, WGPUQuerySet, uint32_t);
void wgpuComputePassEncoderEnd(WGPUComputePassEncoder);
void wgpuComputePassEncoderRelease(WGPUComputePassEncoder);

void wgpuCommandBufferRelease(WGPUCommandBuffer);
void wgpuBindGroupRelease(WGPUBindGroup);
void wgpuBindGroupLayoutRelease(WGPUBindGroupLayout);
void wgpuPipelineLayoutRelease(WGPUPipelineLayout);
void wgpuShaderModuleRelease(WGPUShaderModule);
void wgpuComputePipelineRelease(WGPUComputePipeline);
void wgpuQuerySetRelease(WGPUQuerySet);

uint32_t wgpuGetVersion(void);
