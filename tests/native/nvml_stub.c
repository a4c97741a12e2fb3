/* A libnvidia-ml.so.1 that answers as NVML would on a machine described by environment variables.
 *
 *   NVML_STUB_DEVICES   how many GPUs (default 1)
 *   NVML_STUB_MODEL     gb10, gb202, gb300 or h200 (default gb202)
 *   NVML_STUB_PCI       another PCI device id, hex
 *   NVML_STUB_INIT      return this code from nvmlInitWithFlags
 *   NVML_STUB_BARE      no utilization, temperature or clock
 *   NVML_STUB_NAME      another product name
 *   NVML_STUB_FAULTS    a file, read at every call; each line "INDEX CODE" makes that GPU return CODE from
 *                       everything; INDEX -1 makes nvmlInitWithFlags return CODE; INDEX -2 makes
 *                       nvmlDeviceGetCount count CODE GPUs, the last ones that there are
 *   NVML_STUB_MEMORY    a file, read at every call; each line "INDEX MIB" makes that GPU use so many MiB.
 *                       Replace it by renaming: a file that is half written says half of it
 *   NVML_STUB_SILENT    a file; while it is there, no call for a GPU's memory returns
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

struct device { int number; };
struct memory { unsigned long long total, free, used; };
struct utilization { unsigned int gpu, memory; };
struct pci {
    char legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

#define MOST 64
static struct device devices[MOST];
static int initialised;

static int number_from(const char *name, int otherwise, int base)
{
    const char *text = getenv(name);
    return text && *text ? (int)strtol(text, NULL, base) : otherwise;
}

/* The number that a file of "INDEX NUMBER" lines has for an index; the file's path is in an environment variable. */
static int said_of(const char *name, int wanted, int otherwise)
{
    const char *path = getenv(name);
    FILE *file = path ? fopen(path, "r") : NULL;
    int index, number, found = otherwise;
    if (!file)
        return otherwise;
    while (fscanf(file, "%d %d", &index, &number) == 2)
        if (index == wanted)
            found = number;
    fclose(file);
    return found;
}

static int fault(int wanted, int otherwise) { return said_of("NVML_STUB_FAULTS", wanted, otherwise); }

static void be_silent(void)
{
    const char *path = getenv("NVML_STUB_SILENT");
    const struct timespec moment = {0, 20000000};
    while (path && access(path, F_OK) == 0)
        nanosleep(&moment, NULL);
}

static int is_model(const char *name)
{
    const char *model = getenv("NVML_STUB_MODEL");
    return strcmp(model ? model : "gb202", name) == 0;
}

static int refused(const struct device *device)
{
    if (!initialised)
        return UNINITIALIZED;
    return device ? fault(device->number, SUCCESS) : INVALID_ARGUMENT;
}

static int give(const char *text, char *buffer, unsigned int length)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags)
{
    int code = fault(-1, number_from("NVML_STUB_INIT", SUCCESS, 10));
    (void)flags;
    if (code == SUCCESS)
        initialised = 1;
    return code;
}

int nvmlShutdown(void)
{
    initialised = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    (void)code;
    return "a code that the stub does not know";
}

static int count_all(void) { return number_from("NVML_STUB_DEVICES", 1, 10); }

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (!initialised)
        return UNINITIALIZED;
    *count = (unsigned int)fault(-2, count_all());
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct device **device)
{
    int first = count_all() - fault(-2, count_all());
    if (!initialised)
        return UNINITIALIZED;
    if ((int)index + first >= count_all())
        return INVALID_ARGUMENT;
    *device = &devices[index + first];
    (*device)->number = (int)index + first;
    return fault((*device)->number, SUCCESS);
}

int nvmlDeviceGetUUID(const struct device *device, char *buffer, unsigned int length)
{
    char text[64];
    int code = refused(device);
    if (code)
        return code;
    snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-%012d", device->number);
    return give(text, buffer, length);
}

int nvmlDeviceGetName(const struct device *device, char *buffer, unsigned int length)
{
    const char *name = getenv("NVML_STUB_NAME");
    int code = refused(device);
    if (code)
        return code;
    if (!name)
        name = is_model("gb10")    ? "NVIDIA GB10"
               : is_model("gb300") ? "NVIDIA GB300"
               : is_model("h200")  ? "NVIDIA H200"
                                   : "NVIDIA RTX PRO 6000 Blackwell Workstation Edition";
    return give(name, buffer, length);
}

int nvmlDeviceGetPciInfo_v3(const struct device *device, struct pci *pci)
{
    int id = is_model("gb10") ? 0x2e12 : is_model("gb300") ? 0x31c2 : is_model("h200") ? 0x2335 : 0x2bb1;
    int code = refused(device);
    if (code)
        return code;
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned int)device->number;
    pci->pci_device_id = (unsigned int)number_from("NVML_STUB_PCI", id, 16) << 16 | 0x10de;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(const struct device *device, int *major, int *minor)
{
    int code = refused(device);
    if (code)
        return code;
    *major = is_model("h200") ? 9 : is_model("gb300") ? 10 : 12;
    *minor = is_model("gb10") ? 1 : is_model("gb300") ? 3 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(const struct device *device, struct memory *memory)
{
    int code = refused(device);
    be_silent();
    if (code)
        return code;
    if (is_model("gb10"))
        return NOT_SUPPORTED;
    memory->total = 96ull << 30;
    memory->used = (unsigned long long)said_of("NVML_STUB_MEMORY", device->number, (device->number + 1) << 10) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(const struct device *device, struct utilization *rates)
{
    int code = refused(device);
    if (code)
        return code;
    if (getenv("NVML_STUB_BARE"))
        return NOT_SUPPORTED;
    rates->gpu = 42;
    rates->memory = 17;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(const struct device *device, int sensor, unsigned int *temperature)
{
    int code = refused(device);
    if (code)
        return code;
    if (getenv("NVML_STUB_BARE") || sensor != 0)
        return NOT_SUPPORTED;
    *temperature = 50u + (unsigned int)device->number;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(const struct device *device, int type, unsigned int *clock)
{
    int code = refused(device);
    if (code)
        return code;
    if (getenv("NVML_STUB_BARE") || type != 1)
        return NOT_SUPPORTED;
    *clock = 2418;
    return SUCCESS;
}
